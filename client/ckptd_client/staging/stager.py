"""The stager: one snapshot at a time, from the captured leaves to a sealed slot.

What anything may change is copied before ``stage`` returns. What has earned it is copied while the training goes on,
and the fence holds the next optimizer step until that is done. The seal comes after the copy was checked; a mixture
voids the snapshot and names the tensor.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from ckptd.errors import SnapshotVoided
from ckptd.pulse.page import Phase
from ckptd.pulse.pulse import Pulse
from ckptd.wire.messages import Filled, Filling, Message, Sealed, Voided
from ckptd_client.capture import Leaf
from ckptd_client.save import Save, as_save_error
from ckptd_client.staging import cuda
from ckptd_client.staging.checks import Watched, Witness
from ckptd_client.staging.copier import copy_aside, copy_now
from ckptd_client.staging.earning import Earnings
from ckptd_client.staging.finite import CheckFinite, looked_at, not_finite
from ckptd_client.staging.plan import Plan
from ckptd_client.staging.ring import Slot

Check = Literal["sample", "full", "off"]

NAMES_MAX = 8
NAME_CHARACTERS_MAX = 200
"""Of tensors that are not finite, so much goes to the daemon."""

_log = logging.getLogger(__name__)


class Cargo:
    """Leaves whose copy overlaps the training; kept from save to save as long as they are the same."""

    def __init__(self, numbers: list[int], leaves: Sequence[Leaf], plan: Plan) -> None:
        self.numbers = numbers
        self.leaves = leaves
        self.names = [leaves[n].name for n in numbers]
        self.sources = [leaves[n].tensor for n in numbers]
        self.stops = [min(plan.shard.offsets[n] + plan.sizes[n], plan.shard_bytes) for n in numbers]  # of the shard
        self.on_host = [i for i, source in enumerate(self.sources) if not source.is_cuda]
        self.size_bytes = sum(plan.sizes[n] for n in numbers)
        self.watched: Watched | None = None

    def holds(self, numbers: list[int], leaves: Sequence[Leaf]) -> bool:
        """Whether it is what these would make. No leaf has moved while the list of leaves is the same object."""
        return leaves is self.leaves and numbers == self.numbers


class Flight:
    """The overlapped part of one snapshot: what is copied, and where it goes."""

    def __init__(self, cargo: Cargo, slot: Slot) -> None:
        self.cargo = cargo
        self.targets = [slot.views[n] for n in cargo.numbers]
        self.done: Future[None] | None = None


class Stager:
    """Copies snapshots of one rank. Used from the training thread, except where a method says otherwise."""

    def __init__(
        self,
        tell: Callable[[Message], object],
        *,
        overlap: bool,
        check: Check,
        check_finite: CheckFinite = False,
        pulse: Pulse | None = None,
    ) -> None:
        """``pulse``: where it is to be seen that the training waits for a copy."""
        self._tell = tell
        self._check_finite = check_finite
        self._pulse = pulse
        self._overlap = overlap
        self._check: Check = check
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-copy")
        self._flight: Flight | None = None
        self._transfers = cuda.Transfers()
        self._witness: Witness | None = None
        self._save: Save | None = None
        self._plan: Plan | None = None
        self._earnings = Earnings((), overlap=False)
        self._cargo: Cargo | None = None

    def stage(self, leaves: Sequence[Leaf], plan: Plan, slot: Slot, save: Save) -> None:
        """Copy the leaves into the slot. On return the caller may change whatever an optimizer does not own; the rest
        after :meth:`wait`. A failure ends on the handle, never here."""
        if plan is not self._plan:
            self._plan = plan
            self._earnings = Earnings(leaves, self._overlap)
            self._cargo = None
        self._tell(Filling(at=slot.ref))
        try:
            now, later = self._earnings.split(leaves, plan.order)
            if self._cargo is None or not self._cargo.holds(later, leaves):
                self._cargo = Cargo(later, leaves, plan)
            cargo, flight = self._cargo, Flight(self._cargo, slot)
            witness = self._call_witness(flight)
            transfers = cuda.Transfers()
            transfers.at_call([leaves[n] for n in now], [slot.views[n] for n in now])
            host_now = [n for n in now if not leaves[n].tensor.is_cuda]
            copy_now([slot.views[n] for n in host_now], [leaves[n].tensor for n in host_now])
            transfers.overlapped(cargo.sources, flight.targets)
        except BaseException as error:
            self._void(slot, save, error)
            if not isinstance(error, Exception):  # Ctrl-C: nothing of this fill may stay behind
                raise
            return
        self._earnings.try_out(slot, leaves, now)
        save.stats.overlapped_bytes = cargo.size_bytes
        if cargo.sources or transfers.pending:
            self._flight, self._transfers, self._witness, self._save = flight, transfers, witness, save
            flight.done = self._thread.submit(self._finish, flight, transfers, witness, slot, save)
        else:
            self._seal_soon(leaves, slot, save)

    def _call_witness(self, flight: Flight) -> Witness | None:
        cargo = flight.cargo
        if self._check == "off" or not cargo.sources:
            return None
        if cargo.watched is None:
            cargo.watched = Watched(cargo.names, cargo.sources, flight.targets)
        return Witness(cargo.watched)

    # On the copying thread

    def _finish(
        self, flight: Flight, transfers: cuda.Transfers, witness: Witness | None, slot: Slot, save: Save
    ) -> None:
        try:
            cargo, host = flight.cargo, flight.cargo.on_host
            targets, sources = [flight.targets[i] for i in host], [cargo.sources[i] for i in host]
            for stop in copy_aside(targets, sources, [cargo.stops[i] for i in host]):
                if not transfers.pending:  # else the shard is not filled in order
                    self._tell(Filled(at=slot.ref, bytes=stop))
            transfers.wait()
            in_full = self._check == "full"
            changed = witness.changed(flight.targets, in_full=in_full) if witness is not None else None
            if changed is not None:
                raise SnapshotVoided(
                    f"{changed} was written while it was copied, outside optimizer.step()",
                    hint="call ckpt.fence() before you change it, or construct the Checkpointer with overlap=False",
                )
            self._seal_soon(cargo.leaves, slot, save)
        except Exception as error:
            self._void(slot, save, error)

    def _seal_soon(self, leaves: Sequence[Leaf], slot: Slot, save: Save) -> None:
        if self._check_finite is False:
            self._seal(slot, save)
        else:  # neither the call nor the fence waits for it
            self._thread.submit(self._look_and_seal, leaves, slot, save)

    def _look_and_seal(self, leaves: Sequence[Leaf], slot: Slot, save: Save) -> None:
        try:
            save.not_finite = not_finite(leaves, slot.views, looked_at(leaves, self._check_finite))
            if save.not_finite:
                _log.warning("step %d is not finite in %s: it is marked unhealthy", save.step, _some(save.not_finite))
            self._seal(slot, save)
        except Exception as error:
            self._void(slot, save, error)

    def _seal(self, slot: Slot, save: Save) -> None:
        slot.seal(unhealthy=bool(save.not_finite))
        save.stats.copy_seconds = time.monotonic() - save.started_seconds
        save.advance("sealed")
        names = tuple(name[:NAME_CHARACTERS_MAX] for name in save.not_finite[:NAMES_MAX])
        self._tell(Sealed(at=slot.ref, not_finite=names))

    def _void(self, slot: Slot, save: Save, error: BaseException) -> None:
        _log.debug("step %d: the snapshot is given up", save.step, exc_info=error)
        failure = as_save_error(error)
        error.__traceback__ = None  # its frames would hold the slot's memory as long as somebody holds the handle
        slot.void()
        save.fail(failure)
        self._tell(Voided(at=slot.ref, reason=failure.message[:1000]))

    # The fence

    def wait(self) -> None:
        """Return once parameters and optimizer state may change: the host's copies are done, and devices are told to
        wait for theirs. The time is added to the stall of the save."""
        flight = self._flight
        if flight is None:
            return
        started = time.monotonic()
        if self._witness is not None:
            self._witness.at_fence()
        self._transfers.hold_step()
        if flight.cargo.on_host and flight.done is not None and not flight.done.done():
            with contextlib.nullcontext() if self._pulse is None else self._pulse.phase(Phase.SAVE):
                flight.done.result()
        if self._save is not None:
            self._save.stats.stall_seconds += time.monotonic() - started
        self._flight = self._witness = self._save = None

    def step_begins(self) -> None:
        """Before a hooked optimizer step. Never raises into it."""
        self.wait()
        self._observe(self._earnings.step_begins)

    def step_ends(self) -> None:
        """After a hooked optimizer step. Never raises into it."""
        self._observe(self._earnings.step_ends)

    def _observe(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception:
            _log.exception("the state could not be compared with its copy: nothing is overlapped from now on")
            self._overlap, self._plan = False, None
            self._earnings = Earnings((), overlap=False)

    def boundary_passed(self) -> None:
        """A training step, with all of its optimizers, is over."""
        self._earnings.boundary_passed()

    def close(self) -> None:
        """Wait for the copy in flight, and end the thread."""
        self.wait()
        self._thread.shutdown()
        self._earnings = Earnings((), overlap=False)
        self._cargo = None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more
