"""Where the arena comes from: a predecessor's, or a new one that the daemon makes before it is needed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

from ckptd.arena import Arena
from ckptd.errors import CkptdError, DaemonError, DeadlineExceeded, ResourceError
from ckptd.wire.messages import (
    AwaitIdle,
    BorrowArena,
    Done,
    DropArena,
    HandArena,
    ListOffers,
    MakeArena,
    Offers,
    Request,
    SnapshotOffer,
)
from ckptd_client.link import DaemonLink
from ckptd_client.staging import cuda
from ckptd_client.staging.ring import Ring

ARENA_SECONDS = 600.0
"""How long the daemon may take to make an arena: page by page, at 1 to 5 GB/s."""
IDLE_SECONDS = 120.0
"""How long a restore waits for saves that are still in flight."""
DELAY_SECONDS = 0.5
"""After the start, before the first arena is made. That takes a processor, which a restore needs."""

_log = logging.getLogger(__name__)


class ArenaSupply:
    """The ring of this rank, and the snapshots that a predecessor left.

    Arenas are made in a thread, so that neither construction nor a training step waits for memory; the first save
    does, where it comes too early. None is made while a restore goes on, see :meth:`held_back`.
    """

    def __init__(self, link: DaemonLink, *, slots: int) -> None:
        self._link = link
        self._slots = slots
        self._device = cuda.device_in_use()  # here: another thread has another current device
        self._offers: tuple[SnapshotOffer, ...] = ()
        self._borrowed: dict[str, Arena] = {}
        """Of this rank's predecessors, to be written in."""
        self._shown: dict[str, Arena] = {}
        """Of other ranks, to be read."""
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="ckptd-arena")
        self._may_begin = threading.Lock()
        self._hurry = threading.Event()
        """Somebody waits for an arena, or nobody wants one any more."""
        self._closed = False
        self._ring: Ring | None = None
        self._next: Future[Ring] | None = None
        self._next_bytes = 0

    # Snapshots that were left

    def held(self) -> tuple[SnapshotOffer, ...]:
        """What the daemon has of this run in memory, of whichever rank, newest first. Asks anew each time."""
        self._offers = self._link.ask(ListOffers(), Offers).offers
        return self._offers

    def locate(self, offer: SnapshotOffer) -> tuple[Arena, int]:
        """The arena, mapped, and the slot of a snapshot. Raises :class:`DaemonError` where it is gone."""
        arena = self._borrow(offer)
        if arena.record(offer.slot).ticket != offer.ticket:
            raise DaemonError(f"the snapshot of step {offer.step} of rank {offer.rank} is no longer in memory")
        return arena, offer.slot

    def await_idle(self) -> None:
        """Wait, bounded, until the daemon has no save of this run in flight, of whichever rank."""
        request = AwaitIdle(deadline_seconds=IDLE_SECONDS)
        try:
            self._link.ask(request, Done, seconds=IDLE_SECONDS + 10)
        except (DaemonError, DeadlineExceeded) as error:
            _log.warning("saves in flight could not be awaited: %s", error)

    def _borrow(self, offer: SnapshotOffer) -> Arena:
        """To write in where that is allowed, else a view of it."""
        borrowed = self._borrowed if offer.writable else self._shown
        if offer.arena not in borrowed:
            request = BorrowArena(arena=offer.arena, read_only=not offer.writable)
            borrowed[offer.arena] = self._mapped(request, writable=offer.writable)
        return borrowed[offer.arena]

    def _mapped(self, request: Request, *, writable: bool) -> Arena:
        """An arena that the daemon has already."""
        arena = Arena(self._link.ask_for_arena(request, seconds=ARENA_SECONDS), writable=writable)
        arena.hide_from_children()
        if writable:
            self._pin(arena)
        return arena

    # The ring

    def settle(self, slot_bytes: int) -> None:
        """Choose the arena to write in, once nothing is to be read any more from those that were left: one of these
        where it is large enough, else a new one, made in the background."""
        self._hurry.set()
        for arena in self._shown.values():
            arena.close()
        self._shown.clear()
        for offer in {offer.arena: offer for offer in self._offers if offer.writable}.values():
            try:
                arena = self._borrow(offer)
            except (DaemonError, ResourceError) as error:
                _log.warning("the arena of a predecessor is not used: %s", error)
                continue
            if self._ring is None and arena.shape.slot_bytes >= slot_bytes and arena.shape.slots >= self._slots:
                self._ring = Ring(arena)
                self._maker.submit(arena.populate)  # what a restore has read of it is there already
            else:
                self._drop(arena)
        self._borrowed.clear()
        if self._ring is None:
            self.grow(slot_bytes)

    def grow(self, slot_bytes: int) -> None:
        """Have a larger arena made in the background; the present one serves until it is there."""
        if slot_bytes > self._next_bytes and (self._ring is None or slot_bytes > self._ring.arena.shape.slot_bytes):
            if self._next is not None:  # too small by now, and nobody has used it
                self._next.add_done_callback(self._discard)
            self._next_bytes = slot_bytes
            self._next = self._maker.submit(self._make, slot_bytes)

    def begin(self, slot_bytes: int) -> None:
        """Take an arena that the daemon has made ahead, so that a restore reads into memory that is there; else have
        one made as by :meth:`grow_later`."""
        request = MakeArena(slots=self._slots, slot_bytes=slot_bytes, only_ready=True)
        try:
            self._ring = Ring(self._mapped(request, writable=True))
        except CkptdError as error:
            _log.debug("no arena was made ahead: %s", error)
            self.grow_later(slot_bytes)
            return
        self._maker.submit(self._ring.arena.populate)

    def grow_later(self, slot_bytes: int) -> None:
        """The same, after :data:`DELAY_SECONDS`, or as soon as a save needs it."""
        self._maker.submit(self._hurry.wait, DELAY_SECONDS)
        self.grow(slot_bytes)

    @contextlib.contextmanager
    def held_back(self) -> Generator[None]:
        """No arena begins to be made meanwhile. One that is being made already goes on."""
        held = self._may_begin.acquire(blocking=False)
        try:
            yield
        finally:
            if held:
                self._may_begin.release()

    def _discard(self, made: Future[Ring]) -> None:
        if not made.cancelled() and made.exception() is None:
            self._drop(made.result().arena)

    def ring(self, slot_bytes: int) -> Ring:
        """A ring whose slots have at least so many bytes. Waits for one in the making; raises :class:`ResourceError`
        where there is not enough memory."""
        if self._ring is None or self._ring.arena.shape.slot_bytes < slot_bytes:
            self.grow(slot_bytes)
            self._hurry.set()
            self._adopt(wait=True)
        assert self._ring is not None
        return self._ring

    def current(self) -> Ring | None:
        """The ring in use."""
        return self._ring

    def scratch(self, size_bytes: int) -> memoryview | None:
        """Memory of a free slot of the ring in use, where there is enough; see :meth:`Ring.scratch`."""
        return None if self._ring is None else self._ring.scratch(size_bytes)

    def renewed(self) -> Ring | None:
        """The ring in use, or the new one where it has become ready. To be called while nothing is being copied.

        Raises what the daemon refused this trainer with: nobody would write what is put into the ring.
        """
        if self._link.refusal is not None:
            raise self._link.refusal
        try:
            self._adopt(wait=False)
        except (DaemonError, ResourceError) as error:
            _log.warning("a larger arena could not be had: %s", error)
        return self._ring

    def _adopt(self, *, wait: bool) -> None:
        if self._next is None or not (wait or self._next.done()):
            return
        made, self._next = self._next, None
        try:
            fresh = made.result()
        except (DaemonError, ResourceError):
            self._next_bytes = 0
            raise
        if self._ring is not None:
            self._drop(self._ring.arena)
        self._ring = fresh

    def _drop(self, arena: Arena) -> None:
        """Give an arena up: the daemon keeps it until its snapshots are durable."""
        with contextlib.suppress(DaemonError):  # one that is gone keeps nothing
            self._link.ask(DropArena(arena=arena.id), Done)
        self._unmap(arena)

    def _prepared(self, arena: Arena) -> Arena:
        arena.hide_from_children()
        arena.populate()
        self._pin(arena)
        return arena

    def _pin(self, arena: Arena) -> None:
        if self._device is not None:
            cuda.pin(arena, self._device)

    def _unmap(self, arena: Arena) -> None:
        if self._device is not None:
            cuda.unpin(arena)
        arena.close()

    def _make(self, slot_bytes: int) -> Ring:
        with self._may_begin:
            if self._closed or slot_bytes < self._next_bytes:
                raise DaemonError("nobody wants this arena any more")
            return self._make_as_large(slot_bytes)

    def _make_as_large(self, slot_bytes: int) -> Ring:
        try:
            return self._make_with(self._slots, slot_bytes)
        except ResourceError as error:
            if self._slots == 1:
                raise
            _log.warning("%d slots of %d bytes do not fit, so one is used: %s", self._slots, slot_bytes, str(error))
        return self._make_with(1, slot_bytes)

    def _make_with(self, slots: int, slot_bytes: int) -> Ring:
        request = MakeArena(slots=slots, slot_bytes=slot_bytes)
        return Ring(self._prepared(Arena(self._link.ask_for_arena(request, seconds=ARENA_SECONDS))))

    def wake(self) -> None:
        """A slot has become reusable. From any thread."""
        if self._ring is not None:
            self._ring.wake()

    # The daemon came back

    def hand_over(self) -> None:
        """Give the arena to a daemon that has replaced the one that made it."""
        if self._ring is not None:
            arena = self._ring.arena
            self._link.ask(HandArena(arena=arena.id), Done, fd=arena.fd)

    def close(self) -> None:
        """Let go of all arenas; the daemon keeps what it needs."""
        self._closed = True
        self._hurry.set()
        self._maker.shutdown(cancel_futures=True)
        for arena in self._shown.values():
            arena.close()
        arenas = list(self._borrowed.values())
        if self._ring is not None:
            arenas.append(self._ring.arena)
        if self._next is not None and not self._next.cancelled() and self._next.exception() is None:
            arenas.append(self._next.result().arena)
        self._ring = self._next = None
        self._borrowed.clear()
        self._shown.clear()
        for arena in arenas:
            self._unmap(arena)
