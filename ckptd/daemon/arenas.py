"""The arenas that a daemon owns: who may write into which, what can be restored from them, when they go."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field

import humanize

from ckptd.arena import Arena, ArenaShape, SlotRecord, SlotState
from ckptd.arena.memory import pages
from ckptd.daemon.fill import Fill
from ckptd.daemon.memory import headroom_bytes
from ckptd.daemon.owner import Owner
from ckptd.daemon.ready import ReadyArenas, allocated
from ckptd.errors import CkptdError, FormatError, ResourceError, RunInUse, UsageError
from ckptd.format.records import Snapshot, decode
from ckptd.limits import SLOTS_MAX
from ckptd.wire.messages import SnapshotOffer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldArena:
    """An arena and the trainer that may write into it, dead or alive."""

    arena: Arena
    owner: Owner
    fills: dict[int, Fill] = field(default_factory=dict[int, Fill])
    """Slot → the newest fill of it that the daemon knows."""
    lane: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Snapshots are written in the order in which they were filled."""
    saves: int = 0
    """Of its slots, in flight: the mapping has to stay."""
    dropped: bool = False
    """Its owner needs it no longer."""
    _read_only_fd: int = -1

    def may_go_to(self, owner: Owner) -> bool:
        """Whether ``owner`` may write into it: it does already, or whoever did is proven dead."""
        return self.owner is owner or self.owner.dead or self.owner.same_process(owner)

    @property
    def empty(self) -> bool:
        """Nothing in it can be restored from."""
        return all(record.state in (SlotState.FREE, SlotState.FILLING) for _, record in self.records())

    @property
    def given_up(self) -> bool:
        """Its session is closed, though the process may live, and all that it was filled with is durable."""
        return not self.owner.connected and all(
            record.state in (SlotState.FREE, SlotState.DURABLE) for _, record in self.records()
        )

    def fill(self, slot: int, ticket: int) -> Fill | None:
        """The fill of a slot, if it is this one."""
        found = self.fills.get(slot)
        return found if found is not None and found.record.ticket == ticket else None

    def read_only_fd(self) -> int:
        """A descriptor through which the arena can be read and not written; it lives as long as the arena."""
        if self._read_only_fd < 0:
            self._read_only_fd = os.open(f"/proc/self/fd/{self.arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._read_only_fd

    def close(self) -> None:
        """Give memory and descriptors back."""
        if self._read_only_fd >= 0:
            os.close(self._read_only_fd)
            self._read_only_fd = -1
        self.arena.close()

    def record(self, slot: int) -> SlotRecord | None:
        """``None`` for a slot that is not there, or no longer, or whose record is damaged."""
        if self.arena.closed:
            return None
        try:
            return self.arena.record(slot)
        except (IndexError, FormatError) as error:
            log.warning("arena %s: %s", self.arena.id[:8], error)
            return None

    def records(self) -> list[tuple[int, SlotRecord]]:
        """Slot and record, of the slots whose records are sound."""
        found = [(slot, self.record(slot)) for slot in range(self.arena.shape.slots)]
        return [(slot, record) for slot, record in found if record is not None]


class Arenas:
    """All arenas of one daemon, within its memory budget."""

    def __init__(self, budget_bytes: int | None, ready: ReadyArenas) -> None:
        """``ready``: arenas that are nobody's yet."""
        self._budget_bytes = budget_bytes
        self._ready = ready
        self._held: dict[str, HeldArena] = {}
        self._reserved_bytes = 0
        """Of arenas that are being allocated."""

    def all(self) -> list[HeldArena]:
        """In the order in which they came."""
        return list(self._held.values())

    def find(self, arena_id: str) -> HeldArena | None:
        """``None`` for one that is not here, or no longer."""
        return self._held.get(arena_id)

    @property
    def size_bytes(self) -> int:
        """Of all arenas together, those included that are nobody's yet."""
        return sum(held.arena.shape.size_bytes for held in self._held.values()) + self._ready.size_bytes

    # Coming

    async def make(self, owner: Owner, slots: int, slot_bytes: int, *, only_ready: bool = False) -> HeldArena:
        """A new arena, all of its memory allocated: one that was made ahead, where there is one that fits.
        ``slot_bytes`` is rounded up to whole pages; ``only_ready``: raise :class:`ResourceError` rather than make one.

        Raises :class:`ResourceError`, with figures, where there is not enough; arenas of dead trainers and of closed
        sessions go first.
        """
        if not 1 <= slots <= SLOTS_MAX:
            raise ResourceError(f"an arena has 1 to {SLOTS_MAX} slots, not {slots}")
        shape = ArenaShape(slots, pages(max(slot_bytes, 1)))
        ready = await self._ready.take(shape.slots, shape.slot_bytes, wait=not only_ready)
        if ready is not None:
            return self._hold(ready, owner)
        if only_ready:
            raise ResourceError("no arena of this shape was made ahead")
        self._make_room(shape.size_bytes)
        self._reserved_bytes += shape.size_bytes
        try:
            arena = await allocated(shape)
        finally:
            self._reserved_bytes -= shape.size_bytes
        return self._hold(arena, owner)

    def adopt(self, owner: Owner, arena_id: str, fd: int) -> HeldArena:
        """Take over the arena that a living trainer hands in; one that is here already changes its owner only.

        Takes over ``fd``. Raises :class:`FormatError` where it is no arena, or one that could be truncated under us,
        :class:`RunInUse` where a living process holds it.
        """
        known = self._held.get(arena_id)
        if known is not None:
            os.close(fd)
            if known.owner.seat != owner.seat:
                raise UsageError(f"arena {arena_id} belongs to {known.owner.seat}")
            self._hand_over(known, owner)
            return known
        try:
            arena = Arena(fd)
        except BaseException:
            os.close(fd)
            raise
        if arena.id != arena_id:
            arena.close()
            raise FormatError(f"the arena handed in is {arena.id}, not {arena_id}")
        self._ready.not_needed(arena.shape)
        return self._hold(arena, owner)

    def lend(self, owner: Owner, arena_id: str) -> HeldArena:
        """The arena that a predecessor in this seat left, to read and write.

        Raises :class:`RunInUse` unless the predecessor is proven dead, :class:`UsageError` where there is none.
        """
        held = self._held.get(arena_id)
        if held is None or held.owner.seat != owner.seat or held.dropped:
            raise UsageError(f"no arena {arena_id} of {owner.seat}", hint="make a new one")
        self._hand_over(held, owner)
        return held

    def show(self, owner: Owner, arena_id: str) -> HeldArena:
        """The arena of any rank of the same run, to read. Raises :class:`UsageError` where there is none."""
        held = self._held.get(arena_id)
        if held is None or held.owner.seat.url != owner.seat.url or held.dropped:
            raise UsageError(f"no arena {arena_id} of {owner.seat.url}")
        return held

    def _hand_over(self, held: HeldArena, owner: Owner) -> None:
        if not held.may_go_to(owner):
            raise RunInUse(
                f"arena {held.arena.id} is still mapped by {held.owner}",
                hint="it may be written to again when that process has ended; make a new arena",
            )
        held.owner = owner

    def _hold(self, arena: Arena, owner: Owner) -> HeldArena:
        held = HeldArena(arena, owner)
        self._held[arena.id] = held
        log.info("arena %s of %s for %s", arena.id[:8], humanize.naturalsize(arena.shape.size_bytes), owner.seat)
        return held

    # What is in them

    def offers(self, owner: Owner) -> list[SnapshotOffer]:
        """Snapshots of its run, of whichever rank, that this trainer can restore from, newest first. Blocking."""
        offers: list[SnapshotOffer] = []
        for held in self.all():
            if held.owner.seat.url == owner.seat.url and not held.dropped:
                offers += _offers_of(held.arena, writable=held.owner.seat == owner.seat and held.may_go_to(owner))
        return sorted(offers, key=lambda offer: (offer.generation, offer.step), reverse=True)

    # Going

    def drop(self, held: HeldArena) -> None:
        """Let go of the arena as soon as none of its slots is being saved."""
        held.dropped = True
        self.sweep()

    def drop_abandoned(self, owner: Owner) -> None:
        """A checkpoint of a living trainer is committed: what its dead predecessors left of the run, and in other seats
        what dead trainers of earlier launches left, is older, and of no more use."""
        for held in self.all():
            other = held.owner
            earlier = other.seat == owner.seat or (other.seat.url == owner.seat.url and other.launch != owner.launch)
            if earlier and other.dead:
                held.dropped = True
        self.sweep()

    def sweep(self) -> None:
        """Give back the memory of arenas that were dropped, or left with nothing in them, and are drained."""
        for held in self.all():
            if not held.saves and (held.dropped or (held.owner.dead and held.empty)):
                self._release(held)

    def _make_room(self, wanted: int) -> None:
        """Raise :class:`ResourceError` where ``wanted`` bytes are not to be had, not even for arenas of the dead
        and then, oldest first, for those that were given up: only a restore from memory would miss them."""
        drained = [held for held in self.all() if not held.saves]
        abandoned = [held for held in drained if held.owner.dead]
        abandoned += [held for held in drained if not held.owner.dead and held.given_up]
        if self.room_bytes() < wanted:
            self._ready.give_back()
        while (room := self.room_bytes()) < wanted:
            if not abandoned:
                raise ResourceError(
                    f"an arena of {humanize.naturalsize(wanted)} does not fit: {humanize.naturalsize(room)} are left, "
                    f"arenas hold {humanize.naturalsize(self.size_bytes)}",
                    hint="fewer slots, or a higher memory limit (--memory-budget, the container's limit)",
                )
            self._release(abandoned.pop(0))

    def room_bytes(self) -> int:
        """How much memory is left for arenas."""
        room = headroom_bytes() - self._reserved_bytes
        if self._budget_bytes is not None:
            room = min(room, self._budget_bytes - self.size_bytes - self._reserved_bytes)
        return room

    def _release(self, held: HeldArena) -> None:
        del self._held[held.arena.id]
        log.info("arena %s of %s is given back", held.arena.id[:8], held.owner.seat)
        held.close()

    def close(self) -> None:
        """Give all of them back; living trainers keep their mappings."""
        for held in self.all():
            self._release(held)
        self._ready.give_back()


def _offers_of(arena: Arena, *, writable: bool) -> list[SnapshotOffer]:
    offers: list[SnapshotOffer] = []
    for slot in range(arena.shape.slots):
        try:
            record = arena.record(slot)
            if record.state not in (SlotState.SEALED, SlotState.DURABLE):
                continue
            snapshot = decode(arena.doc(slot, record), Snapshot)
        except CkptdError as error:
            log.warning("slot %d of arena %s cannot be offered: %s", slot, arena.id[:8], error)
            continue
        offers.append(
            SnapshotOffer(
                arena=arena.id,
                slot=slot,
                ticket=record.ticket,
                run=snapshot.run,
                step=snapshot.step,
                generation=snapshot.generation,
                world=snapshot.world,
                rank=snapshot.rank,
                unhealthy=record.unhealthy,
                writable=writable,
                debug=snapshot.debug,
            )
        )
    return offers
