"""Which saves are under way, and what becomes of them when trainers speak, change or die."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from ckptd.arena import SlotState
from ckptd.daemon.arenas import Arenas, HeldArena
from ckptd.daemon.bases import Bases
from ckptd.daemon.commits import Commits
from ckptd.daemon.fill import Fill
from ckptd.daemon.owner import Owner, Seat
from ckptd.daemon.pipeline import Pipeline
from ckptd.daemon.replication import Replication
from ckptd.daemon.save import Save, Tally
from ckptd.daemon.tasks import Tasks
from ckptd.daemon.tier import Checkpoint
from ckptd.daemon.unfinished import with_receipts, without_manifest
from ckptd.errors import DeadlineExceeded, first_line
from ckptd.format.keys import Version

log = logging.getLogger(__name__)

ENDED_KEPT = 4096
"""Trainers whose end is remembered, so that nobody waits for their receipts."""


class Saves:
    """All saves of one daemon."""

    def __init__(
        self,
        tasks: Tasks,
        commits: Commits,
        tally: Tally,
        replication: Replication,
        arenas: Arenas,
        bases: Bases,
        *,
        threads: int,
    ) -> None:
        """``threads``: that digest."""
        self.draining = False
        """Living trainers' new snapshots stay in their slots, for the next daemon."""
        self.tally = tally
        self._tasks = tasks
        self._commits = commits
        self._replication = replication
        self._pipeline = Pipeline(commits, replication, self.tally, self.lost, arenas, bases, threads)
        self._under_way: set[Save] = set()
        self._resuming: dict[asyncio.Task[None], Owner] = {}
        self._ended: dict[tuple[Seat, str], str] = {}
        """Trainers, by seat and launch, that have died, in words."""

    # What trainers say

    def filling(self, held: HeldArena, slot: int, ticket: int) -> None:
        """A slot is being filled; its bytes may leave as they become final."""
        self._begin(held, slot, ticket, (SlotState.FILLING, SlotState.SEALED))

    def filled(self, held: HeldArena, slot: int, ticket: int, final_bytes: int) -> None:
        """So many bytes are final."""
        if fill := held.fill(slot, ticket):
            fill.grow(final_bytes)

    def sealed(self, held: HeldArena, slot: int, ticket: int, not_finite: Sequence[str] = ()) -> None:
        """The snapshot is complete. ``not_finite``: names of tensors in it."""
        record = held.record(slot)
        if record is None or record.ticket != ticket or record.state is not SlotState.SEALED:
            self._stale("sealed", held, slot, ticket)
        elif fill := held.fill(slot, ticket):
            fill.seal(not_finite)
        else:
            self._begin(held, slot, ticket, (SlotState.SEALED,))

    def voided(self, held: HeldArena, slot: int, ticket: int, reason: str) -> None:
        """The fill was given up. The other ranks of the step are told, even where its filling had not been noticed."""
        if held.fill(slot, ticket) is None:
            self._begin(held, slot, ticket, (SlotState.FREE,))
        if fill := held.fill(slot, ticket):
            fill.void(reason)

    async def skip(self, owner: Owner, version: Version, run: str, reason: str) -> None:
        """A rank takes no part in a step."""
        self.tally.counts["skipped"] += 1
        await self._pipeline.skip(owner, version, run, reason)

    # Arenas that change hands

    def adopt(self, held: HeldArena) -> None:
        """Take up what lies sealed or durable in an arena that a living trainer handed in."""
        self._ended.pop((held.owner.seat, held.owner.launch), None)
        found = [(record.ticket, slot) for slot, record in held.records() if record.state is not SlotState.FREE]
        for ticket, slot in sorted(found):
            if fill := held.fill(slot, ticket):
                if any(save.fill is fill for save in self._under_way):
                    continue
                del held.fills[slot]
            self._begin(held, slot, ticket, (SlotState.SEALED, SlotState.DURABLE), adopted=True)

    def settle_dead(self, owner: Owner, arenas: list[HeldArena]) -> None:
        """A trainer has died: finish what it sealed, free what it was filling, and let its waiting peers know."""
        self._end(owner, arenas, "died")

    def unseat(self, owner: Owner, arenas: list[HeldArena], successor: Owner) -> None:
        """A living trainer has lost its seat: finish what it sealed, give up what it has not, and let its waiting peers
        know, who may stand still as it does. Its memory stays its own."""
        self._end(owner, arenas, f"was taken over by {successor}", in_use=True)

    def _end(self, owner: Owner, arenas: list[HeldArena], how: str, *, in_use: bool = False) -> None:
        self._ended[owner.seat, owner.launch] = f"its trainer, {owner}, {how}"
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        for held in arenas:
            self.settle(held, f"its trainer, {owner}, {how} before it was sealed", in_use=in_use)
        self._commits.nudge()

    def settle(self, held: HeldArena, reason: str, *, in_use: bool = False) -> None:
        """Whoever filled this arena does so no longer: finish what is sealed, free what is not. ``in_use``: it may
        still write there, so what is not sealed is only given up."""
        for slot, record in sorted(held.records(), key=lambda item: item[1].ticket):
            fill = held.fill(slot, record.ticket)
            if record.state is SlotState.FILLING:
                if fill:
                    fill.void(reason)
                if not in_use:
                    held.arena.set_record(slot, replace(record, state=SlotState.FREE))
            elif record.state is SlotState.SEALED and fill:
                fill.seal()
            elif record.state is SlotState.SEALED:
                self._begin(held, slot, record.ticket, (SlotState.SEALED,))

    def arrived(self, owner: Owner) -> None:
        """A trainer lives in its seat. Rank 0's has the commits finished that an earlier daemon left behind, and where
        each node has a disk of its own, that of any rank."""
        self._ended.pop((owner.seat, owner.launch), None)
        self._replication.arrived(owner)
        if owner.seat.rank == 0 or not owner.nearest.shared:
            task = self._tasks.spawn(self._resume(owner), f"unfinished commits of {owner.seat}")
            self._resuming[task] = owner
            task.add_done_callback(self._resuming.pop)

    async def _resume(self, owner: Owner) -> None:
        backend, exchange = owner.nearest.backend, owner.exchange(owner.nearest)
        try:
            for version, world, ranks in await without_manifest(backend, exchange):
                checkpoint = Checkpoint(backend, version, world, run="", exchange=exchange)
                log.info("%s has all receipts and no manifest: finishing it", checkpoint)
                here = [] if exchange is None else await with_receipts(backend, version, world, ranks)
                receipts = dict.fromkeys(here)
                await asyncio.shield(self._commits.join(checkpoint, receipts, _unknown, resumed=True, leads=True))
        except Exception as error:
            log.warning("cannot finish what was left at %s: %s", backend.url, first_line(error))

    def lost(self, url: str, launch: str, version: Version, rank: int) -> str | None:
        """Why the receipt of this rank cannot come any more, where that is known here."""
        for (seat, ended_launch), reason in self._ended.items():
            if (seat.url, seat.rank, ended_launch) == (url, rank, launch):
                under_way = any(save.owner.seat == seat and save.version == version for save in self._under_way)
                return None if under_way else reason
        return None

    # Waiting

    def under_way(self, url: str | None = None) -> list[Save]:
        """Saves, of the run at a root or of all runs, that are neither committed nor failed."""
        return [save for save in self._under_way if url is None or save.owner.seat.url == url]

    def busy_owners(self) -> set[Owner]:
        """Whose stores are in use."""
        return {save.owner for save in self._under_way} | set(self._resuming.values())

    async def idle(self, url: str | None, deadline_seconds: float) -> None:
        """Return when no save, of whichever rank of the run at ``url``, is under way, nor a commit that was left
        behind. Raises :class:`DeadlineExceeded` that names what is."""
        until = time.monotonic() + deadline_seconds
        while True:
            waiting = self.under_way(url)
            resuming = [task for task, owner in self._resuming.items() if url in (None, owner.seat.url)]
            if not waiting and not resuming:
                return
            left = until - time.monotonic()
            if left <= 0:
                named = ", ".join(
                    f"{save.version} of rank {save.owner.seat.rank} ({save.stage})" for save in waiting[:8]
                )
                raise DeadlineExceeded(
                    f"{len(waiting) + len(resuming)} saves are not committed after {deadline_seconds:g} s: {named}"
                )
            await asyncio.wait([*resuming, *(save.task for save in waiting if save.task)], timeout=left)

    def close(self) -> None:
        """End the threads; no save may be under way."""
        self._pipeline.close()

    # One save

    def _begin(
        self, held: HeldArena, slot: int, ticket: int, states: tuple[SlotState, ...], *, adopted: bool = False
    ) -> None:
        record = held.record(slot)
        if record is None or record.ticket != ticket or record.state not in states:
            if not adopted:
                self._stale("filling", held, slot, ticket)
            return
        if held.fill(slot, ticket) or (self.draining and not held.owner.dead):
            return
        if (older := held.fills.get(slot)) is not None:
            older.void("its slot was filled anew")
        fill = held.fills[slot] = Fill(held, slot, record)
        save = Save(fill, held.owner, adopted)
        self._under_way.add(save)
        save.task = self._tasks.spawn(self._pipeline.run(save), f"save of {record.version} of {held.owner.seat}")
        save.task.add_done_callback(lambda _: self._under_way.discard(save))

    def _stale(self, what: str, held: HeldArena, slot: int, ticket: int) -> None:
        # A message of an earlier life, or of a fill that is over: what lies in the slot now decides.
        self.tally.counts["stale_messages"] += 1
        log.info("dropped a stale '%s' for slot %d, ticket %d of arena %s", what, slot, ticket, held.arena.id[:8])


def _unknown(rank: int) -> str | None:
    """Of a launch that is over, nothing is known about its ranks."""
    return None
