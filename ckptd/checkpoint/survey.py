"""What retention goes by, asked of the store each time anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.keep import Facts, Keep, Plan, plan
from ckptd.checkpoint.objects import store_clock
from ckptd.checkpoint.run import RECORDS_IN_FLIGHT, Run
from ckptd.errors import FormatError, IntegrityError, NoCheckpoint, StorageError, UnsupportedFormat
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
    references: Mapping[Version, Collection[Version]]
    """Checkpoint → the others whose bytes it needs."""
    now_seconds: float
    """The time, by the store's clock."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a manifest says that matters here."""

    metrics: Mapping[str, float | None]
    references: frozenset[Version]


class Known:
    """What the manifests at one root say. They never change, so each is read once."""

    def __init__(self) -> None:
        self._said: dict[Version, _Said] = {}

    async def read(self, run: Run, committed: Set[Version]) -> None:
        """Learn what these say, and forget the others. One that is damaged says nothing, and `verify` reports it; of
        one of a later format it cannot be told what it needs, so that raises :class:`UnsupportedFormat`."""
        self._said = {version: said for version, said in self._said.items() if version in committed}

        async def one(version: Version) -> None:
            try:
                found = await run.manifest(version)
                said = _Said(found.metrics, frozenset(map(parse_version, found.references)))
            except UnsupportedFormat:
                raise
            except NoCheckpoint:
                return
            except (FormatError, IntegrityError):
                said = _Said({}, frozenset())
            self._said[version] = said

        await each(sorted(committed - self._said.keys()), RECORDS_IN_FLIGHT, one)

    @property
    def metrics(self) -> dict[Version, Mapping[str, float | None]]:
        """What the training reported."""
        return {version: said.metrics for version, said in self._said.items()}

    @property
    def references(self) -> dict[Version, frozenset[Version]]:
        """Checkpoint → the others whose bytes it needs, of those that need any."""
        return {version: said.references for version, said in self._said.items() if said.references}


class Survey:
    """Of one tier of a run."""

    def __init__(self, run: Run, keep: Keep, held: Held | None = None, known: Known | None = None) -> None:
        self.run = run
        self.keep = keep
        self._held = held
        self._known = known or Known()

    async def look(self) -> Found:
        """What there is now, and what is to become of it. Raises :class:`StorageError` where the store cannot tell."""
        # Listed before manifests are: what is committed meanwhile is not taken for uncommitted.
        written = await self._times(CHECKPOINTS)
        committed = await self._times(MANIFESTS)
        announced = await self._times(TOMBSTONES)
        standings = await self.run.standings()
        line = [version for version in await self.run.line() if version in committed]
        uncommitted = {version: at for version, at in written.items() if version not in committed}
        await self._known.read(self.run, committed.keys())
        now_seconds = max(committed.values(), default=0.0)
        if uncommitted or announced or len(line) < len(committed):
            now_seconds = await self._clock() or now_seconds
        facts = Facts(
            line=line,
            beside=await self._beside(line, committed, now_seconds),
            standings=standings,
            committed_seconds=committed,
            metrics=self._known.metrics,
            references=self._known.references,
            held=self._held(line) if self._held is not None else {},
        )
        return Found(
            plan=plan(self.keep, facts),
            committed=frozenset(committed),
            uncommitted=uncommitted,
            orphans=orphans(uncommitted, committed, now_seconds),
            marked=frozenset(standings),
            announced=announced,
            references=self._known.references,
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
