"""One further tier of one run: what its nearer tier has committed is copied there, in the background.

Rank 0's daemon chooses what to copy and says so where all nodes see it; each daemon copies the shards of its own ranks.
The commit there is that of any save: receipts by known names, a proof, and a manifest that whoever is first puts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.processes import holder_here
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.survey import order
from ckptd.checkpoint.tiers import TierRuns, copy_health, copy_identity
from ckptd.daemon.bases import Bases
from ckptd.daemon.chosen import announce, announced
from ckptd.daemon.commits import Commits
from ckptd.daemon.copies import Copies
from ckptd.daemon.owner import Owner
from ckptd.daemon.tier import Checkpoint, Tier
from ckptd.errors import (
    CoverageError,
    FormatError,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    SaveError,
    Superseded,
    first_line,
)
from ckptd.format.keys import Version, manifest_key, receipt_key
from ckptd.jitter import spread_seconds
from ckptd.limits import COPIES_AT_ONCE, COPY_POLL_SECONDS_MAX, COPY_RETRY_SECONDS, COPY_RETRY_SECONDS_MAX

log = logging.getLogger(__name__)

POLL_SECONDS_FIRST = 0.25
REFUSED_KEPT = 64
_UNFIT = (IntegrityError, FormatError, CoverageError, SaveError)
"""What keeps a checkpoint from being copied for good. Anything else may pass."""

State = Literal["idle", "due", "copying", "failing"]


def _unknown(rank: int) -> str | None:
    """A copy does not need its trainer."""
    return None


class Link:
    """From one tier to the next further one, for the ranks that sit here. Its task ends with :meth:`run`'s
    cancellation; nothing that fails here is anybody else's failure."""

    def __init__(
        self,
        number: int,
        commits: Commits,
        bases: Bases,
        on_copied: Callable[[Owner, Tier, str, Version], None],
        on_failed: OnFailed,
    ) -> None:
        self.number = number
        self.members: dict[int, Owner] = {}
        """Rank → who sits there, or sat there last."""
        self.state: State = "due"
        self.version: Version | None = None
        """What is being copied."""
        self.bytes = self.bytes_done = 0
        self.there: Version | None = None
        """The newest on the line that the further tier is known to hold."""
        self.near: Version | None = None
        """The newest that the nearer tier is known to hold."""
        self.behind_since: float | None = None
        self.failures = 0
        """In a row."""
        self.error = ""
        self.news_seconds = time.monotonic()
        self._commits = commits
        self._bases = bases
        self._copies: Copies | None = None
        self._on_copied = on_copied
        self._on_failed = on_failed
        self._refused: dict[Version, str] = {}
        self._copied_seconds: float | None = None
        self._news = asyncio.Event()

    # Who and where

    @property
    def owner(self) -> Owner:
        """Of the ranks here the lowest."""
        return self.members[min(self.members)]

    @property
    def source(self) -> Tier:
        return self.owner.tiers[self.number - 1]

    @property
    def target(self) -> Tier:
        return self.owner.tiers[self.number]

    def join(self, owner: Owner) -> None:
        """A trainer sits here now. Ranks of a launch that is over are forgotten."""
        self.members = {rank: who for rank, who in self.members.items() if who.launch == owner.launch or who.connected}
        self.members[owner.seat.rank] = owner
        self.nudge(None)

    def nudge(self, version: Version | None) -> None:
        """The nearer tier has committed something."""
        self.near = version or self.near
        self.news_seconds = time.monotonic()
        if self.state == "idle":
            self.state = "due"
        if version is not None and self.behind_since is None:
            self.behind_since = time.time()
        self._news.set()

    def held(self, line: Sequence[Version]) -> Mapping[Version, str]:
        """What the nearer tier must keep: what is being copied, and what is due next; never more than these two."""
        there = self.there
        if there is not None:  # it may have gone from the nearer tier
            line = [version for version in line if order(version) > order(there)] + [there]
        here = set(line) - self._refused.keys()
        due = self.target.interval.choose(line, here, {there}, time_is_up=False)
        return {
            version: f"still to be copied to {self.target.backend.url}"
            for version in (self.version, due)
            if version is not None
        }

    # Working

    async def run(self) -> None:
        """Copy what is due, until cancelled."""
        pause_seconds: float | None = POLL_SECONDS_FIRST
        while True:
            self._news.clear()
            try:
                again_seconds = await (self._lead() if 0 in self.members else self._follow())
            except Exception as error:
                pause_seconds = self._failed(error)
            else:
                self.failures, self.error = 0, ""
                self.state = "due" if self._news.is_set() else "idle"
                pause_seconds = again_seconds
            finally:
                self.version = None
                await self._end_copies()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._news.wait()

    def _failed(self, error: Exception) -> float:
        self.failures += 1
        self.error = first_line(error)
        self.state = "failing"
        if isinstance(error, _UNFIT) and not isinstance(error, Superseded) and self.version is not None:
            self._refused[self.version] = self.error
            while len(self._refused) > REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
        self._on_failed(self, error)
        seconds = min(COPY_RETRY_SECONDS * 2.0 ** min(self.failures - 1, 10), COPY_RETRY_SECONDS_MAX)
        return spread_seconds(seconds)

    async def _lead(self) -> float | None:
        """Rank 0 sits here: choose, say so, copy. Returns when to look again, ``None``: when there is news."""
        try:
            run = await Run.open(self.source.reading)
        except NoCheckpoint:
            return None
        further = Run(self.target.backend, run.id)
        here, there = set(await run.committed()), set(await further.committed())
        line = await TierRuns(run.id, [run, further], {}).line()
        self._look_at(line, here, there)
        interval = self.target.interval
        passed = None if self._copied_seconds is None else time.monotonic() - self._copied_seconds
        time_is_up = interval.every_seconds is not None and (passed is None or passed >= interval.every_seconds)
        version = interval.choose(line, here - self._refused.keys(), there, time_is_up=time_is_up)
        if version is None or not await self._fits(run, version):
            await self._announce(None)
            return None if interval.every_seconds is None or passed is None else interval.every_seconds - passed
        await self._announce(version)
        try:
            self._copied_seconds = time.monotonic()
            await asyncio.shield(await self._copy(run, version))
        except _UNFIT:
            await self._announce(None)
            raise
        await self._announce(None)
        self._copied(run, version)
        return 0.0

    async def _fits(self, run: Run, version: Version) -> bool:
        """Whether the shards can be found: those on the disks of a world of another size are somewhere, or nowhere."""
        return self.source.shared or (await run.manifest(version)).world == self.owner.world

    async def _follow(self) -> float | None:
        """Rank 0 sits elsewhere: copy what its daemon has chosen."""
        version = await self._announced()
        if version is None or version in self._refused:
            return self._poll_seconds()
        if await self._is_there(version):
            self.there = version
            return self._poll_seconds()
        run = await Run.open(self.source.reading)
        if not self.source.shared and not await self._has_committed(run, version):
            return self._poll_seconds()
        commit = await self._copy(run, version)
        while not commit.done():
            await asyncio.wait({commit}, timeout=COPY_POLL_SECONDS_MAX)
            if not commit.done() and await self._announced() != version:
                return 0.0  # rank 0's daemon has given it up
        commit.result()
        self._copied(run, version)
        return POLL_SECONDS_FIRST

    def _poll_seconds(self) -> float:
        """Soon after news, then ever more seldom."""
        silent = time.monotonic() - self.news_seconds
        return spread_seconds(min(max(silent / 4, POLL_SECONDS_FIRST), COPY_POLL_SECONDS_MAX))

    async def _has_committed(self, run: Run, version: Version) -> bool:
        """Whether this node's own disk has it. Where it does not even have the receipts of the ranks here, it never
        will, and the others are told."""
        with contextlib.suppress(NoCheckpoint):
            await run.manifest(version)
            return True
        for rank in self.members:
            try:
                await run.backend.head(receipt_key(version, rank, self.owner.world))
            except NotFound:
                reason = f"the disk of its node, {socket.gethostname()}, has nothing of it"
                await self._commits.skip(self._checkpoint(run, version, self.owner.world), rank, reason)
                self._refused[version] = reason
        return False

    async def _copy(self, run: Run, version: Version) -> asyncio.Task[None]:
        """Bring the shards of the ranks here to the further tier; returns the commit that they have joined."""
        self.state, self.version = "copying", version
        self.bytes = self.bytes_done = 0
        await copy_identity(run, self.target.backend, version.generation)
        await copy_health(run, self.target.backend, version)
        holder = holder_here(f"copies to {self.target.backend.url}")
        async with await CheckpointReader.open(run, version, holder=holder) as reader:
            world = reader.manifest.world
            checkpoint = self._checkpoint(run, version, world)
            ranks = [rank for rank in range(world) if rank % self.owner.world in self.members]
            bases = self._bases if self.owner.incremental else None
            copies = self._copies = Copies(reader, self.target.backend, bases, self._expect, self._advance)

            async def copy(rank: int) -> tuple[int, bytes]:
                try:
                    return rank, await copies.bring(rank)
                except _UNFIT as error:
                    await self._commits.skip(checkpoint, rank, first_line(error))
                    raise

            receipts = dict(await each(ranks, COPIES_AT_ONCE, copy))
        return self._commits.join(checkpoint, receipts, _unknown, resumed=True)

    def _checkpoint(self, run: Run, version: Version, world: int) -> Checkpoint:
        return Checkpoint(self.target.backend, version, world, run.id, self.owner.exchange(self.target))

    def _expect(self, size: int) -> None:
        self.bytes += size

    async def _end_copies(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            await copies.release()

    def _advance(self, size: int) -> None:
        self.bytes_done += size
        self.news_seconds = time.monotonic()

    def _copied(self, run: Run, version: Version) -> None:
        self.there = version
        if self.near == version:
            self.behind_since = None
        self.news_seconds = time.monotonic()
        log.info("copied %s to %s", version, self.target.backend.url)
        if self._copies is not None:
            self._copies.committed()
        self._on_copied(self.owner, self.target, run.id, version)

    def _look_at(self, line: Sequence[Version], here: set[Version], there: set[Version]) -> None:
        """Note how far the further tier is behind."""
        self.there = next((version for version in line if version in there), None)
        self.near = next((version for version in line if version in here), None)
        if self.near is None or self.near == self.there:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = time.time()

    async def _announce(self, version: Version | None) -> None:
        if self.owner.world > 1:
            await announce(self.owner.home.backend, self.number, version)

    async def _announced(self) -> Version | None:
        return await announced(self.owner.home.backend, self.number)

    async def _is_there(self, version: Version) -> bool:
        try:
            await self.target.backend.head(manifest_key(version))
        except NotFound:
            return False
        return True


OnFailed = Callable[[Link, Exception], None]
