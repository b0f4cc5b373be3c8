"""The backends that a daemon has open: one for each root and its options, with retries and limits around it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ckptd.checkpoint.keep import Keep
from ckptd.daemon.tier import Interval, Tier
from ckptd.errors import ConfigError, first_line
from ckptd.storage import (
    Backend,
    Finding,
    LeavingUploads,
    Limits,
    SelfTesting,
    normal_url,
    open_backend,
    with_standard_wrappers,
)
from ckptd.wire.messages import TierOfRun

log = logging.getLogger(__name__)

Use = Literal["nearest", "further", "reading", "verifying"]
"""What a store is open for. Each use has limits of its own."""


EXAMINE_AGAIN_SECONDS = 60.0
"""After a store did not answer its examination."""


class Stores:
    """Ranks of one run share a backend, and so its limits."""

    def __init__(
        self,
        limits: Mapping[Use, Limits],
        state_dir: Path,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        *,
        threads_max: int | None = None,
    ) -> None:
        """``threads_max``: for each use of each store."""
        self._limits = limits
        self._threads_max = threads_max
        self._state_dir = state_dir
        self._spawn = spawn
        self._open: dict[tuple[str, bytes, Use], Backend] = {}
        self._opening = 0
        self._cleaning: set[int] = set()
        self.findings: dict[str, list[Finding]] = {}
        """URL → what its self-test did not like."""

    async def open(self, tiers: Sequence[TierOfRun]) -> tuple[Tier, ...]:
        """The tiers of a run. Raises :class:`ckptd.errors.ConfigError`."""
        self._opening += 1
        try:
            return tuple([await self._open_tier(number, tier) for number, tier in enumerate(tiers)])
        finally:
            self._opening -= 1

    async def _open_tier(self, number: int, tier: TierOfRun) -> Tier:
        url, options = normal_url(tier.url), tier.storage_options
        backend = await self._open_one(url, options, "further" if number else "nearest")
        return Tier(
            number,
            backend,
            _keep_of(tier),
            reading=await self._open_one(url, options, "reading"),
            verifying=await self._open_one(url, options, "verifying"),
            options=options,
            shared=tier.shared,
            interval=_interval_of(tier),
        )

    async def _open_one(self, url: str, options: Mapping[str, Any], use: Use) -> Backend:
        # Options may hold secrets: they are kept in memory only, in whole, to tell them apart.
        key = url, msgspec.json.encode(options, order="deterministic"), use
        if key in self._open:
            if use in ("nearest", "further") and id(self._open[key]) not in self._cleaning:
                self._spawn(self._clean(self._open[key]), f"clean-up of {url}")
        else:
            # In a thread, as it may import a cloud library.
            backend = await asyncio.to_thread(
                open_backend, url, options, state_dir=self._state_dir, threads_max=self._threads_max
            )
            if key not in self._open:
                self._open[key] = with_standard_wrappers(backend, self._limits[use])
                if use in ("nearest", "further"):
                    self._spawn(self._examine(self._open[key]), f"self-test of {url}")
        return self._open[key]

    async def _clean(self, backend: Backend) -> None:
        """Once more for each trainer that comes: the one before it may have been killed in the middle of a write."""
        self._cleaning.add(id(backend))
        try:
            await _abort_stale(backend)
        except Exception as error:
            log.warning("%s: uploads left open: %s", backend.url, first_line(error))
        finally:
            self._cleaning.discard(id(backend))

    async def close_others(self, used: Collection[Backend]) -> None:
        """Close what nobody uses; not now, if somebody is about to."""
        if self._opening:
            return
        for key, backend in list(self._open.items()):
            if all(backend is not other for other in used):
                del self._open[key]
                self.findings.pop(backend.url, None)
                await backend.aclose()

    async def _examine(self, backend: Backend) -> None:
        """Clean up after writers that died, and find out whether the store keeps its word. What it does not is logged
        and shown, and training goes on: a save that it breaks fails by itself. Tried again where the store did not
        answer."""
        while any(backend is other for other in self._open.values()):
            found: list[Finding] = []
            answered = True
            for subject, test in (("uploads left open", _abort_stale), ("self-test", _self_test)):
                try:
                    found += await test(backend)
                except Exception as error:
                    answered = False
                    found.append(Finding("error", subject, first_line(error)))
            self._note(backend, [finding for finding in found if finding.level != "ok"])
            if answered:
                return
            await asyncio.sleep(EXAMINE_AGAIN_SECONDS)

    def _note(self, backend: Backend, found: list[Finding]) -> None:
        known = self.findings.get(backend.url, [])
        self.findings[backend.url] = found
        for finding in found:
            if finding not in known:
                level = logging.ERROR if finding.level == "error" else logging.WARNING
                hint = finding.hint or "no hint"
                log.log(level, "%s: %s: %s (%s)", backend.url, finding.subject, finding.message, hint)

    async def aclose(self) -> None:
        await self.close_others(())


async def _abort_stale(backend: Backend) -> list[Finding]:
    if isinstance(backend, LeavingUploads) and (count := await backend.abort_stale_uploads()):
        log.info("%s: aborted %d uploads of dead writers", backend.url, count)
    return []


async def _self_test(backend: Backend) -> list[Finding]:
    return await backend.self_test() if isinstance(backend, SelfTesting) else []


def _interval_of(tier: TierOfRun) -> Interval:
    if (tier.every_steps is not None and tier.every_steps < 1) or (tier.every_seconds or 1) <= 0:
        raise ConfigError(f"the interval of {tier.url} is not positive")
    return Interval(tier.every_steps, tier.every_seconds)


def _keep_of(tier: TierOfRun) -> Keep:
    try:
        return msgspec.convert(tier.keep, Keep)
    except msgspec.ValidationError as error:
        raise ConfigError(f"keep: {error}") from None
