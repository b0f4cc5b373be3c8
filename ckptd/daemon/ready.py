"""Arenas that are there before anybody asks, of the shapes that the last daemon had.

After a loss of the node, or of its daemon, new memory is what a restore from storage and a first save wait for most.
It is made while trainers still import and build their models. What nobody has asked for after a while is given back.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import humanize
import msgspec

from ckptd.arena import Arena, ArenaShape
from ckptd.checkpoint.concurrency import in_thread
from ckptd.errors import CkptdError, first_line
from ckptd.limits import SLOTS_MAX

DELAY_SECONDS = 2.0
"""After the daemon's start: trainers that live hand theirs in, and need no others."""
READY_SECONDS = 900.0
"""How long they wait for somebody who wants them."""
SHAPES_MAX = 64
WASTE_MAX = 1.25
"""A slot has at most so many times the bytes that are asked for."""
ROOM_SHARE_MAX = 0.5
"""Of the memory that is left, as nobody has asked yet."""

log = logging.getLogger(__name__)


class _Shape(msgspec.Struct, frozen=True):
    slots: Annotated[int, msgspec.Meta(ge=1, le=SLOTS_MAX)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(eq=False)
class _Entry:
    shape: ArenaShape
    begun: bool = False
    made: asyncio.Event = field(default_factory=asyncio.Event)
    arena: Arena | None = None

    @property
    def being_made(self) -> bool:
        return self.begun and self.arena is None

    def fits(self, slots: int, slot_bytes: int) -> bool:
        """Neither too small, nor much too large."""
        return self.shape.slots == slots and slot_bytes <= self.shape.slot_bytes <= slot_bytes * WASTE_MAX


async def allocated(shape: ArenaShape) -> Arena:
    """A new arena with all of its memory. Raises :class:`ckptd.errors.ResourceError`."""
    arena = Arena.create(shape)
    try:
        await in_thread(arena.allocate)
    except BaseException:
        arena.close()
        raise
    return arena


class ReadyArenas:
    """Of one daemon."""

    def __init__(self, file: Path) -> None:
        """``file``: where shapes are kept from one daemon to the next."""
        self._file = file
        self._entries: list[_Entry] = []
        self._kept: tuple[_Shape, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Of those that are made, and of the one that is being made."""
        return sum(entry.shape.size_bytes for entry in self._entries if entry.begun)

    async def make(self, room_bytes: Callable[[], int]) -> None:
        """All of them, one after the other, and give back after a while what is left. ``room_bytes``: how much memory
        is left, asked before each."""
        self._entries = [_Entry(shape) for shape in await in_thread(self._read)]
        await asyncio.sleep(DELAY_SECONDS)
        for entry in list(self._entries):
            if entry not in self._entries:
                continue  # somebody was faster
            if entry.shape.size_bytes > room_bytes() * ROOM_SHARE_MAX:
                log.info("no arena of %d bytes is made ahead: there is too little room", entry.shape.size_bytes)
                self._entries.remove(entry)
                continue
            await self._make(entry)
        await asyncio.sleep(READY_SECONDS)
        self.give_back()

    async def _make(self, entry: _Entry) -> None:
        entry.begun = True
        try:
            entry.arena = await allocated(entry.shape)
            log.info("an arena of %s is made ahead", humanize.naturalsize(entry.shape.size_bytes))
        except CkptdError as error:
            log.warning("no arena is made ahead: %s", first_line(error))
        finally:
            if entry.arena is None and entry in self._entries:
                self._entries.remove(entry)
            entry.made.set()

    async def take(self, slots: int, slot_bytes: int, *, wait: bool) -> Arena | None:
        """One that fits, which is the caller's now. ``wait``: also for one that is being made; what is not begun is
        left to the caller to make. ``None`` where there is none."""
        fitting = [entry for entry in self._entries if entry.fits(slots, slot_bytes)]
        if not wait:
            fitting = [entry for entry in fitting if entry.arena is not None]
        if not fitting:
            return None
        entry = min(fitting, key=lambda entry: (not entry.begun, entry.shape.slot_bytes))
        self._entries.remove(entry)
        if entry.begun:
            try:
                await entry.made.wait()
            except asyncio.CancelledError:
                self._entries.append(entry)  # for somebody else
                raise
        return entry.arena

    def not_needed(self, shape: ArenaShape) -> None:
        """A trainer that lives has handed in one of this shape."""
        for entry in self._entries:
            if entry.shape == shape and not entry.being_made:
                self._release(entry)
                return

    def give_back(self) -> None:
        """Everything that nobody has taken."""
        for entry in [entry for entry in self._entries if not entry.being_made]:
            self._release(entry)

    def _release(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        if entry.arena is not None:
            entry.arena.close()

    # From one daemon to the next

    async def keep(self, shapes: Iterable[ArenaShape]) -> None:
        """Write down what the next daemon is to make. A hint: not synced, and never an error."""
        wanted = tuple(sorted((_Shape(shape.slots, shape.slot_bytes) for shape in shapes), key=msgspec.structs.astuple))
        if wanted != self._kept:
            self._kept = wanted
            await in_thread(self._write, wanted[:SHAPES_MAX])

    def _write(self, shapes: tuple[_Shape, ...]) -> None:
        try:
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(shapes))
            os.replace(fresh, self._file)
        except OSError as error:
            log.warning("the shapes of arenas are not kept: %s", first_line(error))

    def _read(self) -> list[ArenaShape]:
        try:
            found = msgspec.json.decode(self._file.read_bytes(), type=list[_Shape])
            return [ArenaShape(shape.slots, shape.slot_bytes) for shape in found[:SHAPES_MAX]]
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, CkptdError) as error:
            log.warning("no arena is made ahead: %s: %s", self._file, first_line(error))
            return []
