"""From a durable receipt to the manifest: one commit for each checkpoint that this daemon has a part in.

Rank 0's daemon collects the receipts, proves them and puts the manifest. The daemons of other ranks leave that to it
for a while, and then do the same: equal receipts make equal bytes, so it does not matter who was first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.holding import Holding
from ckptd.checkpoint.objects import exists
from ckptd.daemon.fencing import check_run
from ckptd.daemon.proving import Proving
from ckptd.daemon.receipts import SKIPPED_BYTES_MAX, put_first, put_same, put_skipped, skip_reason
from ckptd.daemon.tier import Checkpoint
from ckptd.errors import (
    DeadlineExceeded,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    SaveError,
    SaveSkipped,
    Unavailable,
    first_line,
)
from ckptd.format.keys import RUN, manifest_key, mark_key, parse_version, receipt_key, tombstone_key
from ckptd.format.proof import Commit as Proved
from ckptd.format.records import Manifest, Mark, encode
from ckptd.jitter import spread_seconds
from ckptd.limits import RECEIPT_BYTES_MAX
from ckptd.storage import Backend, settle

log = logging.getLogger(__name__)

POLL_SECONDS_FIRST = 0.05
POLL_SECONDS_MAX = 2.0
POLL_SECONDS_MAX_OTHERS = 10.0
"""For daemons that are not rank 0's: many of them may ask the same store."""
PROOF_SECONDS_PER_BYTE = 1e-7
"""Of receipts. Three times what a core needs that does nothing else."""
RECEIPTS_IN_FLIGHT = 16
OBJECTS_IN_FLIGHT = 4
"""Parts of an index may have some MiB each."""

Lost = Callable[[int], str | None]
"""Rank → why its receipt cannot come any more, where this daemon knows."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a commit waits."""

    commit_seconds: float
    takeover_seconds: float

    def before_takeover(self, receipts_bytes: int) -> float:
        """How many seconds rank 0's daemon has for a commit with so many bytes of receipts, at random: else all daemons
        of a large world would read and prove all of it while rank 0's is still at it."""
        proof_seconds = min(receipts_bytes * PROOF_SECONDS_PER_BYTE, self.commit_seconds / 4)
        return spread_seconds(self.takeover_seconds + proof_seconds, 1, 2)


class Commit:
    """One checkpoint on its way to its manifest. The ranks of this daemon join it.

    Receipts have for each rank 190 bytes a tensor and 22 bytes a digest block: 3.2 GB for 16,384 ranks with a thousand
    tensors. They pass through: see :class:`Proving` for what is kept of them.
    """

    def __init__(self, checkpoint: Checkpoint, patience: Patience, lost: Lost, *, resumed: bool) -> None:
        self.checkpoint = checkpoint
        self.receipts = Proving(checkpoint.world, self._read)
        self.skipped: dict[int, str] = {}
        self.leads = checkpoint.exchange is not None
        """Whether rank 0 is here, or nobody else is there to do it."""
        self._offered: set[int] = set()
        """Where each node has a disk of its own: ranks whose receipts the other nodes can see."""
        self._own_bytes = 0
        """Of the largest receipt from here: the others' will be much like it."""
        self._patience = patience
        self._lost = lost
        self._resumed = resumed
        self._news = asyncio.Event()

    def join(self, rank: int, receipt: bytes | None) -> None:
        """The receipt of a rank of this daemon is durable. ``None``: in its place, whatever it is."""
        self._own_bytes = max(self._own_bytes, len(receipt or b""))
        self.receipts.take(rank, receipt)
        self.skipped.pop(rank, None)
        self.leads = self.leads or rank == 0
        self._news.set()

    def skip(self, rank: int, reason: str) -> None:
        """A rank of this daemon takes no part, unless its receipt is there."""
        if rank not in self.receipts.there:
            self.skipped[rank] = reason
            self._news.set()

    def nudge(self) -> None:
        """Something has changed that may decide it: look now."""
        self._news.set()

    async def run(self) -> None:
        """Return when the manifest is there. Raises :class:`SaveSkipped`, :class:`SaveError`, what the proof found,
        :class:`DeadlineExceeded` naming the ranks that are missing."""
        try:
            async with asyncio.timeout(self._patience.commit_seconds):
                if (self._resumed or not self.leads) and await self._others_commit():
                    return
                if await self._collect():
                    await self._publish(await self._prove())
        except TimeoutError:
            ranks = self._missing()
            raise DeadlineExceeded(
                f"{self.checkpoint} has no manifest after {self._patience.commit_seconds:g} s: "
                + (f"no receipt of rank {_listed(ranks)}" if ranks else "the store did not take it")
            ) from None
        finally:
            await self.receipts.aclose()

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.checkpoint.world) if rank not in self.receipts.there]

    async def _others_commit(self) -> bool:
        """Whether the manifest is there already, or appears before it is our turn to put it."""
        checkpoint = self.checkpoint
        pause = POLL_SECONDS_FIRST
        turn_seconds: float | None = None
        while True:
            with _asked_again_later():
                if await self._is_committed():
                    return True
                if await exists(checkpoint.backend, tombstone_key(checkpoint.version)):
                    raise SaveError(f"{checkpoint} is being deleted")
                if self.leads:
                    return False
                if 0 not in self.receipts.there:
                    await self._look_for(0)
            self._judge()
            # Before rank 0's receipt is there, its daemon is not late.
            if turn_seconds is None and 0 in self.receipts.there:
                expected_bytes = self._own_bytes * checkpoint.world
                turn_seconds = time.monotonic() + self._patience.before_takeover(expected_bytes)
            if turn_seconds is not None and time.monotonic() >= turn_seconds:
                log.info("rank 0's daemon has not committed %s: taking over", checkpoint)
                return False
            await self._pause(pause if turn_seconds is None else min(pause, turn_seconds - time.monotonic()))
            pause = min(pause * 2, POLL_SECONDS_MAX)

    async def _collect(self) -> bool:
        """Wait for the receipts of all ranks. ``False`` where the manifest appeared meanwhile."""
        pause = POLL_SECONDS_FIRST
        while True:
            with _asked_again_later():
                await self._offer()
                await each(self._missing(), RECEIPTS_IN_FLIGHT, self._look_and_feed)
                if not self.receipts.complete and not self.leads and await self._is_committed():
                    return False
                if not self.receipts.complete:
                    await self.receipts.feed()
            self._judge()
            if self.receipts.complete and (self.checkpoint.exchange is None or self._offered >= self.receipts.there):
                return True
            await self._pause(pause)
            pause = min(pause * 2, POLL_SECONDS_MAX if self.leads else POLL_SECONDS_MAX_OTHERS)

    async def _is_committed(self) -> bool:
        """Whether the manifest is there; then it is durable too, whoever put it and has perhaps died of it."""
        backend, key = self.checkpoint.backend, manifest_key(self.checkpoint.version)
        if not await exists(backend, key):
            return False
        await settle(backend, key)
        return True

    async def _look_for(self, rank: int) -> None:
        checkpoint = self.checkpoint
        backend, key = checkpoint.place(rank)
        try:
            if self.receipts.full and checkpoint.exchange is None and await _is_long(backend, key):
                self.receipts.take(rank, None)
                return
            data = await backend.get(key, limit_bytes=RECEIPT_BYTES_MAX)
        except NotFound:
            reason = self._lost(rank)
            if reason is not None:
                self.skipped[rank] = reason
                await put_skipped(backend, key, checkpoint.version, rank, run=checkpoint.run, reason=reason)
            return
        reason = skip_reason(data)
        if reason is not None:
            self.skipped[rank] = reason
            return
        if checkpoint.exchange is not None:
            # Beside the receipts of this node, so that each disk tells of the whole checkpoint.
            await put_same(checkpoint.backend, receipt_key(checkpoint.version, rank, checkpoint.world), data)
            self._offered.add(rank)
        self.receipts.take(rank, data)

    async def _look_and_feed(self, rank: int) -> None:
        if self.receipts.full:
            await self.receipts.feed()  # as much as there is room for is read while the proof goes on
        await self._look_for(rank)
        if self.receipts.waits_for(rank):
            await self.receipts.feed()

    async def _read(self, rank: int) -> bytes:
        """A receipt that was stored."""
        checkpoint = self.checkpoint
        key = receipt_key(checkpoint.version, rank, checkpoint.world)
        try:
            return await checkpoint.backend.get(key, limit_bytes=RECEIPT_BYTES_MAX)
        except NotFound:
            raise SaveError(f"{checkpoint.backend.url}/{key} was deleted before it was committed") from None

    async def _offer(self) -> None:
        """Let the other nodes see the receipts of this one. Raises :class:`IntegrityError` where they see others."""
        if self.checkpoint.exchange is None:
            return
        if self.checkpoint.run:
            await check_run(self.checkpoint.backend, self.checkpoint.run)  # before others' receipts come there
        for rank in sorted(self.receipts.there - self._offered):
            backend, key = self.checkpoint.place(rank)
            receipt = self.receipts.has(rank) or await self._read(rank)
            found = await put_first(backend, key, receipt)
            if (reason := skip_reason(found)) is not None:
                self.skipped[rank] = reason
            elif found != receipt:
                raise IntegrityError(f"{backend.url}/{key}: another node has another receipt of rank {rank}")
            self._offered.add(rank)

    async def _prove(self) -> Proved:
        while True:
            with _asked_again_later():
                return await self.receipts.prove()
            await self._pause(POLL_SECONDS_MAX)

    def _judge(self) -> None:
        """Raise :class:`SaveSkipped` where a rank takes no part."""
        for rank, reason in self.skipped.items():
            raise SaveSkipped(f"{self.checkpoint} is given up: rank {rank} takes no part: {reason}")

    async def _pause(self, seconds: float) -> None:
        """Until there is news from the ranks here, or the time is up. With jitter, so that daemons spread out."""
        try:
            async with asyncio.timeout(spread_seconds(max(seconds, 0.001))):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def _publish(self, commit: Proved) -> None:
        backend = self.checkpoint.backend
        version, world = commit.manifest.version, commit.manifest.world
        await check_run(backend, commit.manifest.run)  # its root may have gone since the shards were put
        # What was found, and not put here, may have been put by a process that died before it was durable.
        await settle(backend, RUN)
        await settle(backend, receipt_key(version, 0, world))
        await each(commit.objects.items(), OBJECTS_IN_FLIGHT, lambda item: put_same(backend, *item))
        if commit.pinned:
            # Before the manifest, so that there is no moment in which retention could take it.
            mark = Mark(
                by="save", mark="pinned", reason="asked for when it was saved", version=str(commit.manifest.version)
            )
            await put_same(backend, mark_key(commit.manifest.version, "pinned", "save"), encode(mark))
        if await exists(backend, tombstone_key(self.checkpoint.version)):
            raise SaveError(f"{self.checkpoint} is being deleted: it was not committed for too long")
        await self._put_manifest(commit.manifest)
        log.info("committed %s, %d bytes", self.checkpoint, commit.manifest.bytes)

    async def _put_manifest(self, manifest: Manifest) -> None:
        """While whatever it refers to is held, as whoever wrote its receipts may have died since."""
        needed = [parse_version(name) for name in manifest.references]
        if self.checkpoint.exchange is not None:
            # A new disk lacks what ranks of other nodes refer to on theirs.
            needed = [version for version in needed if await exists(self.checkpoint.backend, manifest_key(version))]
        try:
            holding = await Holding.of(self.checkpoint.backend, needed)
        except NoCheckpoint as error:
            raise SaveError(f"{self.checkpoint} needs bytes of a checkpoint that has gone: {error.message}") from None
        try:
            await put_same(self.checkpoint.backend, manifest_key(self.checkpoint.version), encode(manifest))
        finally:
            await holding.release()


@contextlib.contextmanager
def _asked_again_later() -> Generator[None]:
    """A store that does not answer is asked again in the next round, as long as the commit may take."""
    try:
        yield
    except Unavailable as error:
        log.warning("%s", first_line(error))


async def _is_long(backend: Backend, key: str) -> bool:
    """Whether what lies there is no word that its rank takes no part, so that it need not be read now."""
    return (await backend.head(key)).size_bytes > SKIPPED_BYTES_MAX


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown
