"""Which saves are tried where a store is slower than a run saves, so that all ranks try the same ones."""

from __future__ import annotations

STRIDE_MAX = 4096
GOOD_TRIES = 4
"""So many tries in a row have to find a slot before twice as many are made."""


class Spacing:
    """A checkpoint needs a slot of every rank. Where each rank took what it had a slot for, hardly any step would have
    one of all. So a rank that found none tries only every second save from then on, every fourth, and so on: those
    whose place in the row of saves is a multiple of its stride. Strides are powers of two, so what a rank with a long
    stride tries, all others try too; and the place follows from the steps alone, which are the same on all ranks.

    Belongs to the training thread.
    """

    def __init__(self) -> None:
        self.stride = 1
        self._good = 0
        self._step = 0
        self._gap = 1

    def tries(self, step: int) -> bool:
        """Whether the save of ``step`` is one to try. To be asked once for each save, in order."""
        self._gap = max(1, step - self._step)
        self._step = step
        return (step // self._gap) % self.stride == 0

    def tried(self, *, found_slot: bool) -> None:
        """How the last one went."""
        if not found_slot:
            self.stride = min(2 * self.stride, STRIDE_MAX)
            self._good = 0
            return
        self._good += 1
        if self._good == GOOD_TRIES:
            self.stride = max(1, self.stride // 2)
            self._good = 0
