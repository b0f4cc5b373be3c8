"""What counts as a hang, and what is done about one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptd.daemon.watch.durations import Durations
from ckptd.limits import (
    HANG_FACTOR,
    HANG_FIRST_SECONDS,
    HANG_FLOOR_SECONDS,
    HANG_GRACE_SECONDS,
    HANG_SAVE_SECONDS,
    STRAGGLER_RATIO,
)
from ckptd.pulse.page import Phase

WARM_STEPS = 5
"""Steps of a life that are not compared with others: they compile, tune, and fill caches."""
LEARNED_MIN = 20
"""Durations of a phase that must be known before its limit is learned."""
QUANTILE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """Fixed for the life of a daemon. ``notify``, ``dump`` and ``end`` are the rungs, each of which may be left out."""

    notify: bool = True
    """Raise an alert, with a report."""
    dump: bool = True
    """Have all ranks of the node dump their stacks for the report."""
    end: bool = False
    """SIGKILL the stalled trainers, so that their launcher starts the group anew."""
    dry_run: bool = False
    """Only count what would have been done."""
    floor_seconds: float = HANG_FLOOR_SECONDS
    """No learned limit of a step is shorter."""
    factor: float = HANG_FACTOR
    """A learned limit is so many times the duration that all but one in a hundred stay below."""
    first_seconds: float = HANG_FIRST_SECONDS
    """Limit of the start, the first steps, compiling, restoring, evaluation, and of steps that nothing is known of."""
    save_seconds: float = HANG_SAVE_SECONDS
    """Limit of the trainer's own part in a save."""
    grace_seconds: float = HANG_GRACE_SECONDS
    """From the report to the end."""
    straggler_ratio: float = STRAGGLER_RATIO
    """A rank whose steps take so many times as long as those of the others lags."""

    @property
    def active(self) -> bool:
        """Whether anything is to be done at all."""
        return self.notify or self.dump or self.end

    @property
    def tick_seconds(self) -> float:
        """How often to look."""
        return max(min(1.0, self.floor_seconds / 5), 0.02)

    def limit_seconds(self, phase: Phase, learned: Mapping[Phase, Durations], *, warm: bool, given: float) -> float:
        """How long a stay in ``phase`` may last. ``given``: by the trainer's own word, which goes before anything else;
        0 for none. ``warm``: the first steps of its life are done."""
        if given > 0:
            return given
        known = learned.get(phase)
        seen = known.quantile_seconds(QUANTILE) * self.factor if known and known.count >= LEARNED_MIN else None
        if phase is Phase.STEP:
            if not warm or seen is None:
                return max(self.first_seconds, seen or 0.0)
            return max(self.floor_seconds, seen)
        default = self.save_seconds if phase is Phase.SAVE else self.first_seconds
        return max(default, seen or 0.0)
