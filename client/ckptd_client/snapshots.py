"""Taking snapshots: from the live state to a slot of the arena, of the right size and in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import msgspec

from ckptd.format import records
from ckptd.format.records import Snapshot
from ckptd_client.capture import Capture, State
from ckptd_client.estimate import expected_growth_bytes
from ckptd_client.generation import Life
from ckptd_client.save import Save
from ckptd_client.staging.fence import Boundary, Fence
from ckptd_client.staging.plan import Plan
from ckptd_client.staging.ring import Ring
from ckptd_client.staging.stager import Stager
from ckptd_client.supply import ArenaSupply

_log = logging.getLogger(__name__)

DOC_BYTES_SPARE = 65536
"""Of a snapshot's record beyond its layout and state tree."""


def planned_or_refused(state: State) -> tuple[Capture, Plan]:
    """A state that cannot be saved is refused now, by :class:`ckptd.errors.StateError`, and not hours later."""
    capture = state.capture()
    plan = Plan.of(capture)
    for notice in capture.notices:
        _log.warning("%s", notice)
    return capture, plan


class Snapshots:
    """Snapshots of one rank's state. Belongs to the training thread."""

    def __init__(
        self,
        state: State,
        planned: tuple[Capture, Plan],
        supply: ArenaSupply,
        stager: Stager,
        rank: int,
        world: int,
        *,
        check_replicas: bool = False,
    ) -> None:
        """``planned``: what :func:`planned_or_refused` has made of the state."""
        self._state = state
        self._supply = supply
        self._stager = stager
        self._rank = rank
        self._world = world
        self._check_replicas = check_replicas
        self._capture, self._plan = planned
        self._arena_settled = False
        self.fence = Fence(state.optimizers, stager.step_begins, stager.step_ends)
        self._scalers = state.scalers()
        """As of the last capture: a state may be too large to be searched for them at each step."""
        self.boundary = Boundary(lambda: self.fence.steps, lambda: self._scalers, watched=bool(state.optimizers()))

    def take(self, save: Save, life: Life, metrics: Mapping[str, float | None], *, wait_seconds: float) -> None:
        """Copy the state into a slot; the copy of what has earned it goes on after the return, see :class:`Stager`.

        Raises :class:`ckptd.errors.StateError` for a state that cannot be saved,
        :class:`ckptd.errors.DeadlineExceeded` where no slot becomes free in time, and
        :class:`ckptd.errors.ResourceError` where there is no memory; nothing was written then.
        """
        started = time.monotonic()
        self._stager.wait()  # one copy at a time
        capture, plan = self._planned()
        doc = self._doc(save, life, capture, plan, metrics)
        ring = self._ring_for(plan, len(doc))
        slot = ring.take(plan, capture.leaves, doc, save.version, seconds=wait_seconds)
        save.stats.wait_seconds = slot.waited_seconds
        save.stats.bytes = plan.shard_bytes
        save.ref = slot.ref
        self._stager.stage(capture.leaves, plan, slot, save)
        save.stats.stall_seconds += time.monotonic() - started

    def _planned(self) -> tuple[Capture, Plan]:
        capture = self._state.capture()
        self._scalers = self._state.scalers()
        if capture.structure is not self._capture.structure:
            self._plan = Plan.of(capture)
        self._capture = capture
        return capture, self._plan

    def _doc(self, save: Save, life: Life, capture: Capture, plan: Plan, metrics: Mapping[str, float | None]) -> bytes:
        return records.encode(
            Snapshot(
                check_replicas=self._check_replicas,
                debug=save.debug,
                generation=save.version.generation,
                launch=life.launch,
                layout=plan.layout,
                metrics=dict(metrics),
                parent=life.parent,
                parts=capture.tops,
                pin=save.pin,
                rank=self._rank,
                run=life.run,
                step=save.step,
                tree=msgspec.Raw(capture.tree),
                world=self._world,
            )
        )

    # Memory

    @property
    def idle(self) -> bool:
        """See :attr:`Ring.idle`; also where there is no ring yet."""
        ring = self._supply.current()
        return ring is None or ring.idle

    def _ring_for(self, plan: Plan, doc_bytes: int) -> Ring:
        ring = self._supply.renewed()
        if ring is None or not ring.fits(plan, doc_bytes):
            ring = self._supply.ring(plan.slot_bytes(doc_bytes))
        return ring

    def slot_bytes_expected(self) -> int:
        """Of a slot for the state as it will be once the optimizers have made theirs."""
        capture, plan = self._planned()
        growth = expected_growth_bytes(self._state.optimizers())
        if growth:
            growth = int(growth * _copied(capture, plan))
        doc_bytes = len(plan.layout) * (2 if growth else 1) + len(capture.tree) * 2 + DOC_BYTES_SPARE
        return plan.slot_bytes(doc_bytes + growth)

    def boundary_passed(self) -> None:
        """A training step is over. After the first one, when the optimizers have made their state, a larger arena is
        asked for where it turns out not to fit, so that the first save does not wait for it."""
        self._stager.boundary_passed()
        if self.fence.steps == 0 or self._arena_settled:
            return
        self._arena_settled = True
        ring = self._supply.current()
        capture, plan = self._planned()
        doc_bytes = len(plan.layout) + len(capture.tree) + DOC_BYTES_SPARE
        if ring is None or not ring.fits(plan, doc_bytes):
            self._supply.grow(plan.slot_bytes(doc_bytes))


def _copied(capture: Capture, plan: Plan) -> float:
    """How much of the tensors that it holds this rank copies; the rest is copied by other ranks."""
    held_bytes = sum(piece.local.nbytes for part in capture.parts.values() for piece in part.each())
    return min(sum(plan.sizes) / held_bytes, 1.0) if held_bytes else 1.0
