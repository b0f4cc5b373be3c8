"""What retention goes by, asked of the store each time anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.keep import Facts, Keep, Plan, plan
from ckptd.checkpoint.objects import store_clock
from ckptd.checkpoint.run import RECORDS_IN_FLIGHT, Run
from ckptd.errors import FormatError, IntegrityError, NoCheckpoint, StorageError
from ckptd.format.keys import CHECKPOINTS, GENERATIONS, MANIFESTS, TOMBSTONES, Version, parse_version
from ckptd.limits import ORPHAN_SECONDS

Held = Callable[[Sequence[Version]], Mapping[Version, str]]
"""The line, newest first → what of it somebody still needs, and for what."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, and what it leaves to be cleared up."""

    plan: Plan
    committed: frozenset[Version]
    uncommitted: Mapping[Version, float]
    """Of which something is stored, but no manifest: when the newest object of it was written, by the store's clock."""
    orphans: Mapping[Version, str]
    """Those of them that will never be committed, each with the reason."""
    marked: frozenset[Version]
    announced: Mapping[Version, float]
    """Checkpoints whose deletion has begun, and when it was announced, by the store's clock."""
    now_seconds: float
    """The time, by the store's clock."""


class Survey:
    """Of one tier of a run. Remembers the metrics of what it has seen, as they never change."""

    def __init__(self, run: Run, keep: Keep, held: Held | None = None) -> None:
        self.run = run
        self.keep = keep
        self._held = held
        self._metrics: dict[Version, Mapping[str, float | None]] = {}

    async def look(self) -> Found:
        """What there is now, and what is to become of it. Raises :class:`StorageError` where the store cannot tell."""
        # Listed before manifests are: what is committed meanwhile is not taken for uncommitted.
        written = await self._times(CHECKPOINTS)
        committed = await self._times(MANIFESTS)
        announced = await self._times(TOMBSTONES)
        standings = await self.run.standings()
        line = [version for version in await self.run.line() if version in committed]
        uncommitted = {version: at for version, at in written.items() if version not in committed}
        now_seconds = max(committed.values(), default=0.0)
        if uncommitted or announced or len(line) < len(committed):
            now_seconds = await self._clock() or now_seconds
        facts = Facts(
            line=line,
            beside=await self._beside(line, committed, now_seconds),
            standings=standings,
            committed_seconds=committed,
            metrics=await self._metrics_of(line) if self.keep.best is not None else {},
            held=self._held(line) if self._held is not None else {},
        )
        return Found(
            plan=plan(self.keep, facts),
            committed=frozenset(committed),
            uncommitted=uncommitted,
            orphans=orphans(uncommitted, committed, now_seconds),
            marked=frozenset(standings),
            announced=announced,
            now_seconds=now_seconds,
        )

    async def _times(self, prefix: str) -> dict[Version, float]:
        """When the newest object of each version below a prefix was written."""
        found: dict[Version, float] = {}
        async for info in self.run.backend.scan(prefix):
            with contextlib.suppress(FormatError):  # a foreign name
                version = parse_version(info.key.removeprefix(prefix).partition("/")[0].removesuffix(".json"))
                found[version] = max(info.modified_seconds, found.get(version, 0.0))
        return found

    async def _clock(self) -> float | None:
        # Where it cannot be asked, less time seems to have passed, and so less is cleared up.
        with contextlib.suppress(StorageError, ExceptionGroup):
            return await store_clock(self.run.backend)
        return None

    async def _beside(
        self, line: Sequence[Version], committed: Mapping[Version, float], now_seconds: float
    ) -> dict[Version, float]:
        """For how long the others have been off the line: since a generation was opened from before them."""
        others = sorted(committed.keys() - set(line), key=order)
        if not others:
            return {}
        opened = {
            info.key.removeprefix(GENERATIONS).removesuffix(".json"): info.modified_seconds
            async for info in self.run.backend.scan(GENERATIONS)
        }
        on_line = {version.generation for version in line}
        left: dict[Version, float] = {}
        for version in others:
            times = [opened.get(f"{number:06d}", now_seconds) for number in on_line if number > version.generation]
            # Committed late, by a generation that had already been left: counts from then.
            left[version] = max(0.0, now_seconds - max(min(times, default=now_seconds), committed[version]))
        return left

    async def _metrics_of(self, line: Sequence[Version]) -> Mapping[Version, Mapping[str, float | None]]:
        async def read(version: Version) -> None:
            # A manifest that cannot be read says nothing for its checkpoint; `verify` reports it.
            with contextlib.suppress(FormatError, IntegrityError, NoCheckpoint):
                self._metrics[version] = (await self.run.manifest(version)).metrics

        await each([version for version in line if version not in self._metrics], RECORDS_IN_FLIGHT, read)
        return self._metrics


def orphans(
    uncommitted: Mapping[Version, float], committed: Mapping[Version, float], now_seconds: float
) -> dict[Version, str]:
    """What will never be committed: nothing of it was written for long, and something newer is committed, so that each
    rank of its generation, which writes its saves one after the other, has given it up."""
    newest = max(map(order, committed), default=(0, 0))
    return {
        version: f"never committed, and nothing of it was written for {now_seconds - at:.0f} s"
        for version, at in uncommitted.items()
        if order(version) < newest and now_seconds - at > ORPHAN_SECONDS
    }


def order(version: Version) -> tuple[int, int]:
    """By generation, and in it by step."""
    return version.generation, version.step
