"""The ring: the slots of a rank's arena as the trainer sees them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ckptd.arena import Arena, SlotRecord, SlotState
from ckptd.errors import DeadlineExceeded
from ckptd.format.digests import digest
from ckptd.format.keys import Version
from ckptd.wire.messages import SlotRef
from ckptd_client.capture import Leaf
from ckptd_client.staging.plan import Plan

LOOK_SECONDS = 0.2
"""How often a waiting trainer looks at the slots itself."""


@dataclass(slots=True)
class Slot:
    """A slot that was taken for one fill."""

    arena: Arena
    number: int
    ticket: int
    views: list[torch.Tensor]
    """Where each leaf goes."""
    waited_seconds: float
    """For the slot to become free."""

    @property
    def ref(self) -> SlotRef:
        return SlotRef(arena=self.arena.id, slot=self.number, ticket=self.ticket)

    def still_holds(self) -> bool:
        """Whether this fill is what lies in the slot."""
        return not self.arena.closed and self.arena.record(self.number).ticket == self.ticket

    def seal(self, *, unhealthy: bool = False) -> None:
        self._set(SlotState.SEALED, unhealthy)

    def void(self) -> None:
        self._set(SlotState.FREE)

    def _set(self, state: SlotState, unhealthy: bool = False) -> None:
        record = self.arena.record(self.number)
        if record.ticket == self.ticket:
            self.arena.set_record(self.number, replace(record, state=state, unhealthy=unhealthy))


class Ring:
    """Slots of one arena, filled one after the other by one trainer."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._changed = threading.Condition()
        self._plans: dict[int, Plan] = {}
        self._views: dict[int, list[torch.Tensor]] = {}

    def fits(self, plan: Plan, doc_bytes: int) -> bool:
        return plan.doc_at + doc_bytes <= self.arena.shape.slot_bytes

    def wake(self) -> None:
        """A slot has become reusable."""
        with self._changed:
            self._changed.notify_all()

    def take(self, plan: Plan, leaves: Sequence[Leaf], doc: bytes, version: Version, *, seconds: float) -> Slot:
        """Take a free slot, or the one that has been durable longest; write the record that makes it FILLING.

        The newest snapshot is never taken while another slot can be. Waits at most ``seconds``; raises
        :class:`DeadlineExceeded`, saying what the slots hold.
        """
        began = time.monotonic()
        number = self._await_reusable(seconds)
        waited_seconds = time.monotonic() - began
        ticket = max(record.ticket for record in self.arena.records()) + 1
        # From here the old content is gone; the record says so before a byte is written.
        record = SlotRecord(
            state=SlotState.FILLING,
            step=version.step,
            generation=version.generation,
            ticket=ticket,
            shard_bytes=plan.shard_bytes,
            pid=os.getpid(),
            held_bytes=plan.held_bytes,
        )
        self.arena.set_record(number, record)
        try:
            views = self._begin(number, record, plan, leaves, doc)
        except BaseException:
            self.arena.set_record(number, replace(record, state=SlotState.FREE))
            raise
        return Slot(self.arena, number, ticket, views, waited_seconds)

    def _begin(
        self, number: int, record: SlotRecord, plan: Plan, leaves: Sequence[Leaf], doc: bytes
    ) -> list[torch.Tensor]:
        """Write all but the tensors; returns where these go."""
        memory = self.arena.slot(number)
        start = plan.doc_at
        memory[start : start + len(doc)] = doc
        if self._plans.get(number) is not plan:
            memory[: len(plan.shard.header)] = plan.shard.header
            self._views[number] = plan.views(memory, leaves)
            self._plans[number] = plan
        self.arena.set_record(number, replace(record, doc_bytes=len(doc), doc_digest=digest(doc)))
        return self._views[number]

    def _await_reusable(self, seconds: float) -> int:
        stop = time.monotonic() + seconds
        with self._changed:
            while (number := self._reusable()) is None:
                left = stop - time.monotonic()
                if left <= 0:
                    held = ", ".join(f"step {r.step} {r.state.name}" for r in self.arena.records())
                    raise DeadlineExceeded(f"no free slot within {seconds:g} s: {held}")
                # The record in the arena is the truth; a daemon that was replaced may not have sent its event.
                self._changed.wait(min(left, LOOK_SECONDS))
        return number

    def _reusable(self) -> int | None:
        records = self.arena.records()
        free = [n for n, record in enumerate(records) if record.state is SlotState.FREE]
        if free:
            return free[0]
        durable = [n for n, record in enumerate(records) if record.state is SlotState.DURABLE]
        return min(durable, key=lambda n: records[n].ticket, default=None)

    @property
    def idle(self) -> bool:
        """There are several slots, and none of them holds what is still to be written."""
        states = {record.state for record in self.arena.records()}
        return self.arena.shape.slots > 1 and states <= {SlotState.FREE, SlotState.DURABLE}

    def scratch(self, size_bytes: int) -> memoryview | None:
        """A free slot's memory to read into, where one is large enough; its content is undefined afterwards."""
        if size_bytes > self.arena.shape.slot_bytes:
            return None
        for number, record in enumerate(self.arena.records()):
            if record.state is SlotState.FREE:
                self._plans.pop(number, None)
                return self.arena.slot(number)[:size_bytes]
        return None
