"""Overlap is earned: which tensors were seen to change inside hooked optimizer steps, and only there.

A save that copies a tensor at once leaves an exact copy in the slot. When the next hooked step begins, the live tensor
must still equal it; when the step ends, it must have changed. Then its copy may overlap the next forward and backward.
A tensor that differs when the step begins is written elsewhere, and is copied at once for the rest of the generation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.limits import KIB
from ckptd_client.capture import Leaf
from ckptd_client.staging.checks import data_pointers, equal_bytes
from ckptd_client.staging.ring import Slot

OVERLAP_BYTES_MIN = 16 * KIB
"""A smaller tensor in the host's memory is copied at once: to prove and to watch it takes longer than that."""
PROVE_AGAIN_SAVES = 64
"""After so many overlapped saves one is copied at once and proves all of its tensors anew."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trial:
    """Tensors that were copied at once into a slot, until the next step shows when they change."""

    slot: Slot
    numbers: list[int]
    leaves: Sequence[Leaf]
    begun: bool = False


class Earnings:
    """The record for one structure of the state: one verdict per leaf."""

    def __init__(self, leaves: Sequence[Leaf], overlap: bool) -> None:
        self._candidate = [
            overlap
            and leaf.fenced
            and leaf.tensor.nbytes >= (1 if leaf.tensor.is_cuda else OVERLAP_BYTES_MIN)
            and leaf.tensor.is_contiguous()
            and not leaf.tensor.is_inference()
            for leaf in leaves
        ]
        self._earned = [False] * len(leaves)
        self._refused = [False] * len(leaves)
        self._leaves = leaves
        self._pointers = data_pointers([leaf.tensor for leaf in leaves])
        self._trial: _Trial | None = None
        self._saves_since_proof = 0

    def split(self, leaves: Sequence[Leaf], order: Sequence[int]) -> tuple[list[int], list[int]]:
        """The leaf numbers of ``order`` (in shard order) that must be copied now, and those that may be copied later.

        A tensor that has moved in memory since the last save has to earn its overlap again.
        """
        if leaves is not self._leaves:  # at least one has moved
            pointers = data_pointers([leaf.tensor for leaf in leaves])
            for number, (now, before) in enumerate(zip(pointers, self._pointers, strict=True)):
                if now != before:
                    self._earned[number] = False
            self._leaves, self._pointers = leaves, pointers
        self._saves_since_proof += 1
        if self._saves_since_proof > PROVE_AGAIN_SAVES:
            self._saves_since_proof = 0
            return list(order), []
        now_ = [number for number in order if not self._earned[number]]
        later = [number for number in order if self._earned[number]]
        return now_, later

    def try_out(self, slot: Slot, leaves: Sequence[Leaf], copied_now: Sequence[int]) -> None:
        """Watch the tensors that were just copied at once."""
        numbers = [n for n in copied_now if self._candidate[n] and not self._refused[n]]
        self._trial = _Trial(slot, numbers, leaves) if numbers else None

    def step_begins(self) -> None:
        """Before a hooked step: what differs from its copy was written outside."""
        trial = self._trial
        if trial is None or not trial.slot.still_holds():
            self._trial = None
            return
        trial.begun = True
        quiet: list[int] = []
        for number in trial.numbers:
            leaf = trial.leaves[number]
            if equal_bytes(leaf.tensor, trial.slot.views[number]):
                quiet.append(number)
                continue
            self._refused[number] = True
            if self._earned[number]:
                self._earned[number] = False
                _log.warning("%s changes outside optimizer.step(): it is copied at once from now on", leaf.name)
        trial.numbers = quiet

    def step_ends(self) -> None:
        """After a hooked step: what has changed now, and had not before, has earned its overlap."""
        trial = self._trial
        if trial is None or not trial.begun or not trial.slot.still_holds():
            return
        rest: list[int] = []
        for number in trial.numbers:
            if equal_bytes(trial.leaves[number].tensor, trial.slot.views[number]):
                rest.append(number)  # untouched by this step: another optimizer's, or frozen
            else:
                self._earned[number] = True
        trial.numbers = rest

    def boundary_passed(self) -> None:
        """The training step is over: what did not change in it stays unproven until the next save."""
        if self._trial is not None and self._trial.begun:
            self._trial = None
