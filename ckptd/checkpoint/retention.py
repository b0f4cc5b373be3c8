"""Which checkpoints stay, and how the others go. One actor: rank 0's daemon of the newest generation (promise P9)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from ckptd.checkpoint import leases
from ckptd.checkpoint.run import PINS, VERDICTS, Run, latest_verdict
from ckptd.checkpoint.selectors import spoken
from ckptd.errors import AlreadyExists, ConfigError, FormatError, NotFound, StorageError, Superseded, first_line
from ckptd.format.keys import (
    MANIFESTS,
    MARKS,
    TOMBSTONES,
    Version,
    checkpoint_prefix,
    manifest_key,
    parse_version,
    tombstone_key,
)
from ckptd.format.records import Tombstone, encode
from ckptd.limits import TOMBSTONE_SECONDS
from ckptd.storage import settle

DELETED_AT_ONCE_MAX = 1000
"""Objects in one call; what the stores take."""


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to keep, of the committed checkpoints on the line of the run."""

    last: int = 5
    """The newest so many."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ConfigError(f"Keep(last={self.last})", hint="keep at least one checkpoint")


@dataclass(frozen=True, slots=True)
class Plan:
    """A verdict on every checkpoint on the line, each with its reason."""

    keep: dict[Version, str]
    delete: dict[Version, str]


@dataclass(slots=True)
class Outcome:
    """What a pass of retention did."""

    deleted: list[Version] = field(default_factory=list[Version])
    waiting: dict[Version, str] = field(default_factory=dict[Version, str])
    """Announced, but somebody reads it: the next pass tries again."""
    failed: dict[Version, str] = field(default_factory=dict[Version, str])
    """The store refused or did not answer: the next pass tries again."""


Held = Callable[[Sequence[Version]], Mapping[Version, str]]
"""The line, newest first → what of it somebody still needs, and for what."""


def plan(
    keep: Keep,
    line: Sequence[Version],
    *,
    verified: Collection[Version] = (),
    pinned: Collection[Version] = (),
    held: Mapping[Version, str] | None = None,
) -> Plan:
    """The verdict. ``line``: newest first. What lies off the line is not judged here, and so stays.

    Never deletes the newest checkpoint, nor the newest one that was verified.
    """
    newest_verified = next((version for version in line if version in verified), None)
    verdict = Plan({}, {})
    for number, version in enumerate(line):
        if number < keep.last:
            verdict.keep[version] = f"one of the last {keep.last}"
        elif version == newest_verified:
            verdict.keep[version] = "the newest that was verified"
        elif version in pinned:
            verdict.keep[version] = "pinned"
        elif held and version in held:
            verdict.keep[version] = held[version]
        else:
            verdict.delete[version] = f"{number} newer ones are committed, keep last={keep.last}"
    return verdict


async def current_plan(run: Run, keep: Keep, held: Held | None = None) -> Plan:
    """The verdict on what is stored now."""
    marked = await run.marked()
    line = await run.line()
    return plan(
        keep,
        line,
        verified={version for version, kinds in marked.items() if latest_verdict(kinds, *VERDICTS) == "verified"},
        pinned={version for version, kinds in marked.items() if latest_verdict(kinds, *PINS) == "pinned"},
        held=held(line) if held is not None else None,
    )


async def apply(run: Run, keep: Keep, *, generation: int, held: Held | None = None) -> Outcome:
    """One pass, to be made after a commit: finish what an earlier pass left half deleted, then delete what the plan
    says.

    Each deletion is announced by a tombstone; then, asked anew: the plan still says so, ``generation`` is still the
    newest, nobody holds a reader's lease. The manifest goes first, so that the checkpoint ceases to exist at one
    moment; then its data and marks; the tombstone after :data:`TOMBSTONE_SECONDS`. Failures are collected, never
    raised, but for :class:`Superseded`, and :class:`StorageError` where not even the plan can be made.
    """
    outcome = Outcome()
    announced = await _announced(run)
    verdict = await current_plan(run, keep, held)
    committed = {info.key: info.modified_seconds async for info in run.backend.scan(MANIFESTS)}
    now_seconds = max(committed.values(), default=0.0)  # of the newest commit: the store's clock, for nothing
    half_deleted = {*await run.incomplete(), *await run.marked()} & announced.keys()
    for version in sorted({*announced, *verdict.delete}, key=lambda version: (version.generation, version.step)):
        await _check_actor(run, generation)
        try:
            if manifest_key(version) in committed:
                if version in verdict.delete:
                    await _delete_committed(run, keep, held, version, verdict.delete[version], outcome)
                else:
                    await _delete(run, [tombstone_key(version)])  # no longer to go: pinned meanwhile, say
                continue
            if version in half_deleted:
                await _delete_data(run, version)
                outcome.deleted.append(version)
            if now_seconds - announced.get(version, now_seconds) > TOMBSTONE_SECONDS:
                await _delete(run, [tombstone_key(version)])
        except (StorageError, FormatError, ExceptionGroup) as error:
            outcome.failed[version] = _why(error)
    return outcome


async def _check_actor(run: Run, generation: int) -> None:
    newest = max(await run.generation_numbers(), default=generation)
    if newest != generation:
        raise Superseded(
            f"{run.backend.url}: generation {newest} exists, so generation {generation} deletes nothing more"
        )


async def _announced(run: Run) -> dict[Version, float]:
    """Checkpoints whose deletion has begun, and when it was announced, by the store's clock."""
    found: dict[Version, float] = {}
    async for info in run.backend.scan(TOMBSTONES):
        with contextlib.suppress(FormatError):  # a foreign name
            found[parse_version(info.key.removeprefix(TOMBSTONES).removesuffix(".json"))] = info.modified_seconds
    return found


async def _delete_committed(
    run: Run, keep: Keep, held: Held | None, version: Version, reason: str, outcome: Outcome
) -> None:
    tombstone = Tombstone(reason=reason, version=str(version))
    with contextlib.suppress(AlreadyExists):  # announced by an earlier pass
        await run.backend.put(tombstone_key(version), encode(tombstone), if_absent=True)
    # Announced first and asked afterwards, while readers take their lease first and look for the tombstone
    # afterwards: one of the two sees the other.
    readers = await leases.live(run.backend, leases.reader_stem(version))
    if readers:
        outcome.waiting[version] = f"{spoken(version)} is read by {next(iter(readers.values())).holder}"
        return
    if version not in (await current_plan(run, keep, held)).delete:
        return
    await _delete(run, [manifest_key(version)])
    await _delete_data(run, version)
    outcome.deleted.append(version)


async def _delete_data(run: Run, version: Version) -> None:
    """Everything of a checkpoint that has no manifest any more, but for its tombstone."""
    try:
        await run.backend.head(manifest_key(version))
    except NotFound:
        await settle(run.backend, manifest_key(version))  # whoever removed it may have died before it was gone for good
    else:
        raise StorageError("is still there", key=manifest_key(version))
    for prefix in (checkpoint_prefix(version), f"{MARKS}{version}/"):
        await _delete(run, [info.key async for info in run.backend.scan(prefix)])


async def _delete(run: Run, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), DELETED_AT_ONCE_MAX):
        await run.backend.delete(keys[start : start + DELETED_AT_ONCE_MAX])


def _why(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return first_line(error)
