"""Which saves are tried where a store is slower than a run saves, so that all ranks try the same ones."""

from __future__ import annotations

GOOD_TRIES = 4
"""So many tries in a row have to find a slot before twice as many are made."""
SAVES_MAX = 4096
"""Of about as many saves one is always tried."""


class Spacing:
    """A checkpoint needs a slot of every rank. Where each rank took what it had a slot for, hardly any step would have
    one of all. So a rank that found none tries only the first save in each *window* of steps from then on. The widths
    of windows are powers of two, and the first window of each width begins with step 0. So what is the first save in
    the window of one rank is the first in the narrower one of another too, whatever led to these widths; and it follows
    from the steps alone, which are the same on all ranks.

    Belongs to the training thread.
    """

    def __init__(self) -> None:
        self.width = 1
        """Of a window, in steps."""
        self._good = 0
        self._may_widen = True
        self._step: int | None = None
        self._gap = 1
        """At least the distance between the last two saves, a power of two."""

    def tries(self, step: int, *, idle: bool = False) -> bool:
        """Whether the save of ``step`` is one to try. To be asked once for each save, in order. ``idle``: there are
        several slots and all are free, so that this save takes none from the next that all ranks try."""
        before, self._step = self._step, step
        if before is None:
            return True
        self._gap = 1 << (abs(step - before) - 1).bit_length() if step != before else self._gap
        return idle or step // self.width != before // self.width

    def tried(self, *, found_slot: bool) -> None:
        """How the last one went. Until a slot has become free, further tries say nothing about how long one takes."""
        if found_slot:
            self._may_widen = True
            self._good += 1
            if self._good == GOOD_TRIES:
                self.width = max(1, self.width // 2)
                self._good = 0
            return
        self._good = 0
        if self._may_widen:
            self._may_widen = False
            self.width = min(2 * max(self.width, self._gap), SAVES_MAX * self._gap)
