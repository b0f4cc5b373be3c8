"""One fill of one slot, as far as the daemon knows: how much of it is final, whether it is sealed or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptd.arena import SlotRecord, SlotState
from ckptd.errors import SnapshotVoided

if TYPE_CHECKING:
    from ckptd.daemon.arenas import HeldArena


_NOT_FINITE = "not all values are finite"


class Fill:
    """Identified by its arena, slot and ticket. What it says of the slot is true of that ticket only."""

    def __init__(self, held: HeldArena, slot: int, record: SlotRecord) -> None:
        self.held = held
        self.slot = slot
        self.record = record
        """As it stood when the daemon first saw it; the state in it is not kept up to date."""
        self.sealed = record.state in (SlotState.SEALED, SlotState.DURABLE)
        self.unhealthy = _NOT_FINITE if record.unhealthy else ""
        """Why what was saved is of no use, as far as that was looked for; known once it is sealed."""
        self._final_bytes = 0
        self._voided = ""
        self._changed = asyncio.Event()

    def grow(self, final_bytes: int) -> None:
        """The shard's first ``final_bytes`` bytes are final; never fewer than before."""
        self._final_bytes = max(self._final_bytes, final_bytes)
        self._tell()

    def seal(self, not_finite: Sequence[str] = ()) -> None:
        """The snapshot is complete and checked. Without effect once it is given up."""
        if not self._voided:
            record = self.held.record(self.slot)
            if record is not None and record.ticket == self.record.ticket and record.unhealthy:
                self.unhealthy = ": ".join([_NOT_FINITE, *([", ".join(not_finite)] if not_finite else [])])
            self.sealed = True
            self._tell()

    def void(self, reason: str) -> None:
        """Nothing of it may become visible. Without effect once it is sealed."""
        if not self.sealed:
            self._voided = reason
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Sealed, or given up."""
        return self.sealed or bool(self._voided)

    def check(self) -> None:
        """Raise :class:`SnapshotVoided` unless the slot still holds this fill."""
        if self._voided:
            raise SnapshotVoided(self._voided)
        now = self.held.arena.record(self.slot)
        if (
            now.state is SlotState.FREE
            or replace(now, state=self.record.state, unhealthy=self.record.unhealthy) != self.record
        ):
            raise SnapshotVoided(f"slot {self.slot} was filled anew while its snapshot was being written")

    async def final(self, stop: int) -> None:
        """Return once the shard's first ``stop`` bytes are final. Raises :class:`SnapshotVoided`."""
        self.check()
        while not self.sealed and self._final_bytes < stop:
            await self._changed.wait()
            self.check()

    async def ended(self) -> None:
        """Return once it is sealed or given up."""
        while not self.over:
            await self._changed.wait()

    def settle(self, state: SlotState) -> None:
        """Move a sealed slot on, to DURABLE or FREE, if it still holds this fill."""
        now = self.held.record(self.slot)
        if now is not None and now.ticket == self.record.ticket and now.state is SlotState.SEALED:
            self.held.arena.set_record(self.slot, replace(now, state=state))
