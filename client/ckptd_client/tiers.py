"""The tiers of a run as the user gives them, and which of them all ranks see."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.objects import token
from ckptd.checkpoint.tiers import answering
from ckptd.errors import CkptdError, ConfigError, NotFound
from ckptd.format.keys import probe_key
from ckptd.limits import SMALL_RECORD_BYTES_MAX, TIER_ANSWER_SECONDS, TIERS_MAX
from ckptd.storage import normal_url
from ckptd.wire.messages import TierOfRun
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.roots import Root

NODE = "{node}"
"""In a URL: this machine's name."""
NODE_VARIABLE = "CKPTD_NODE"
"""Says what this machine is called, where its host name does not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    every_steps: int | None = None
    every: float | None = None
    keep: Keep | None = None
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Tier(_Options):
    """A place for the run's checkpoints: a local disk, a file server, an object store.

    The nearest tier of a run gets every save. A further one gets what the tier before it has committed: the first
    checkpoint at or after each multiple of ``every_steps``, or the newest after ``every`` seconds, or, with neither,
    each one; what it is too slow for is left out. ``keep``: what retention leaves there; ``None``: as on the nearest.
    ``{node}`` in the URL stands for this machine's name: ``$CKPTD_NODE``, else the host's.
    """

    url: str

    def __repr__(self) -> str:
        return f"Tier({self.url!r})"


Url = str | Tier | Sequence[str | Tier]


def as_tiers(url: Url, keep: Keep | None, storage_options: Mapping[str, Any] | None) -> tuple[Tier, ...]:
    """What the user gave, complete. Raises :class:`ConfigError`."""
    _check_kind(url)
    given = (url,) if isinstance(url, str | Tier) else tuple(url)
    if not 1 <= len(given) <= TIERS_MAX:
        raise ConfigError(f"{len(given)} tiers", hint=f"give one to {TIERS_MAX} roots, the nearest first")
    if storage_options is not None and len(given) > 1:
        raise ConfigError("storage_options for several tiers", hint="give each its own: Tier(url, storage_options=…)")
    tiers = [each if isinstance(each, Tier) else Tier(each) for each in given]
    nearest = tiers[0]
    if nearest.every_steps is not None or nearest.every is not None:
        raise ConfigError(
            f"the nearest tier, {nearest.url}, has an interval", hint="it gets every save; give it to Checkpointer"
        )
    if keep is not None and nearest.keep is not None and keep != nearest.keep:
        raise ConfigError(f"keep is given twice for {nearest.url}", hint="leave one of the two out")
    default = keep or nearest.keep or Keep()
    for tier in tiers:
        if (tier.every_steps is not None and tier.every_steps < 1) or (tier.every is not None and tier.every <= 0):
            raise ConfigError(f"the interval of {tier.url} is not positive")
    complete = tuple(
        replace(
            tier,
            url=normal_url(tier.url),
            keep=tier.keep or default,
            storage_options=dict(tier.storage_options or storage_options or {}),
        )
        for tier in tiers
    )
    if len({tier.url for tier in complete}) < len(complete):
        raise ConfigError("two tiers have one root", hint="give each a place of its own")
    return complete


def _check_kind(url: object) -> None:
    """Raise :class:`ConfigError` for what names no root, or several without an order."""
    several = list(cast("Sequence[object]", url)) if isinstance(url, list | tuple) else [url]
    for each in several:
        named = each.url if isinstance(each, Tier) else each
        if not isinstance(named, str):
            hint = "give a URL or a path as a str, a Tier, or a list of them"
            raise ConfigError(f"url={url!r} names no root for a run", hint=hint)
        keep = each.keep if isinstance(each, Tier) else None
        if not isinstance(keep, Keep | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"keep={keep!r} of {named} is no Keep", hint="as in keep=Keep(last=3)")


def roots_of(tiers: Sequence[Tier], launch: str) -> tuple[Root, ...]:
    """Where the tiers lie for this process."""
    node = re.sub(r"[^A-Za-z0-9._-]", "-", os.environ.get(NODE_VARIABLE) or socket.gethostname())
    return tuple(Root(tier.url.replace(NODE, node), dict(tier.storage_options or {}), launch) for tier in tiers)


def check_furthest(tiers: Sequence[Tier], world: int) -> None:
    """Raise :class:`ConfigError` where no tier can be seen by all ranks, as far as the URLs tell."""
    if world > 1 and all(NODE in tier.url for tier in tiers):
        raise _none_shared([tier.url for tier in tiers])


def find_shared(agreement: Agreement, roots: Sequence[Root]) -> tuple[Root, ...]:
    """Find out which tiers are the same place for all ranks: rank 0 leaves a probe in each, and the others look.

    A tier that does not answer counts as shared; so does one that rank 0 may not write to. Raises :class:`ConfigError`,
    on all ranks, where none is.
    """
    if agreement.world == 1:
        return tuple(roots)
    unique, left = agreement.decide("probe", None, lambda _: run_blocking(_leave_probes(roots)))

    def judge(all_seen: list[list[bool]]) -> list[bool]:
        shared = [all(by_rank) for by_rank in zip(*all_seen, strict=True)]
        run_blocking(_remove_probes(roots, unique, left))
        if not any(shared):
            raise _none_shared([root.url for root in roots])
        return shared

    shared = agreement.decide("shared", lambda: run_blocking(_look(roots, unique, left)), judge)
    return tuple(replace(root, shared=yes) for root, yes in zip(roots, shared, strict=True))


def of_hello(tiers: Sequence[Tier], roots: Sequence[Root]) -> tuple[TierOfRun, ...]:
    """The tiers as the daemon is told of them."""
    return tuple(
        TierOfRun(
            url=root.url,
            keep=msgspec.to_builtins(tier.keep),
            storage_options=dict(root.options),
            shared=root.shared,
            every_steps=tier.every_steps,
            every_seconds=tier.every,
        )
        for tier, root in zip(tiers, roots, strict=True)
    )


async def _leave_probes(roots: Sequence[Root]) -> list[Any]:
    unique = token()
    left: list[bool] = []
    for root in roots:
        try:
            async with root.visit() as backend, answering(root.url, TIER_ANSWER_SECONDS):
                await backend.put(probe_key(unique), b"{}")
            left.append(True)
        except CkptdError:
            left.append(False)
    return [unique, left]


async def _look(roots: Sequence[Root], unique: str, left: Sequence[bool]) -> list[bool]:
    seen: list[bool] = []
    for root, there in zip(roots, left, strict=True):
        try:
            if there:
                async with root.visit() as backend, answering(root.url, TIER_ANSWER_SECONDS):
                    await backend.get(probe_key(unique), limit_bytes=SMALL_RECORD_BYTES_MAX)
            seen.append(True)
        except NotFound:
            seen.append(False)
        except CkptdError:
            seen.append(True)
    return seen


async def _remove_probes(roots: Sequence[Root], unique: str, left: Sequence[bool]) -> None:
    for root, there in zip(roots, left, strict=True):
        if there:
            try:
                async with root.visit() as backend, answering(root.url, TIER_ANSWER_SECONDS):
                    await backend.delete([probe_key(unique)])
            except (CkptdError, ExceptionGroup):
                continue  # an object of two bytes that nobody reads


def _none_shared(urls: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the ranks see different places at {', '.join(urls)}",
        hint="add a tier that all nodes share, such as an object store or a file server",
    )
