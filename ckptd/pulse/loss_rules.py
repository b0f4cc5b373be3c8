"""What counts as a bad loss: pure, so that it can be tried on any history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

import msgspec

from ckptd.errors import ConfigError
from ckptd.limits import LOSS_WINDOW_MAX

OnBadLoss = Literal["nothing", "alert", "pin", "go_back"]
"""What is done about a bad loss; each does what the ones before it do."""
MAD_TO_DEVIATION = 1.4826
"""The median distance from the median, times this, is the standard deviation of what is normally distributed."""


class LossRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a loss is bad: it is not finite, or far above what it was."""

    finite: tuple[str, ...] = ("loss", "grad_norm")
    """Columns that must not be nan or infinite. With a ``GradScaler`` of float16, leave the gradients' norm out: it
    looks for infinities by making some."""
    finite_steps: int = 1
    """So many steps in a row that are not finite."""
    spiking: tuple[str, ...] = ("loss",)
    """Columns that must not spike: go up by more than ``deviations`` deviations above the median of the last
    ``window_steps`` steps."""
    spike_steps: int = 3
    """So many steps in a row that are too high."""
    window_steps: int = 200
    """What is too high does not count among them; but where it stays so for as many steps, it is the new level."""
    warm_steps: int = 50
    """So many figures must be known before any is too high."""
    deviations: float = 10.0
    """A deviation is robust: 1.4826 times the median distance from the median."""
    floor_share: float = 0.05
    """No deviation is taken to be smaller than this share of the median: a loss that hardly moves may move a little."""

    def __post_init__(self) -> None:
        whole = {"finite_steps": self.finite_steps, "spike_steps": self.spike_steps, "warm_steps": self.warm_steps}
        for name, steps in whole.items():
            if not 1 <= steps <= self.window_steps:
                raise ConfigError(f"LossRules({name}={steps})", hint=f"1 to window_steps, {self.window_steps}")
        if self.window_steps > LOSS_WINDOW_MAX:
            raise ConfigError(f"LossRules(window_steps={self.window_steps})", hint=f"at most {LOSS_WINDOW_MAX}")
        if not 0 < self.deviations < math.inf or not 0 <= self.floor_share < math.inf:
            raise ConfigError(
                f"LossRules(deviations={self.deviations}, floor_share={self.floor_share})", hint="give finite numbers"
            )


@dataclass(frozen=True, slots=True)
class BadLoss:
    """Something is wrong with a training."""

    column: str
    first_step: int
    """What was saved before it is not touched by it."""
    step: int
    """At which it was found."""
    what: str
    """In words."""


class LossJudge:
    """Hears of one step after the other, and tells of each bad stretch once."""

    def __init__(self, rules: LossRules) -> None:
        self._rules = rules
        self._finite = {name: _Stretch(rules.finite_steps) for name in rules.finite}
        self._spiking = {name: _Stretch(rules.spike_steps) for name in rules.spiking}
        self._windows = {name: deque[float](maxlen=rules.window_steps) for name in rules.spiking}

    def hear(self, step: int, values: Mapping[str, float]) -> list[BadLoss]:
        """What is found bad with this step. A column that is not in ``values`` says nothing."""
        found: list[BadLoss] = []
        for name, stretch in self._finite.items():
            if name in values and stretch.add(step, bad=not math.isfinite(values[name])):
                found.append(BadLoss(name, stretch.first_step, step, f"{name} is {values[name]:g}"))
        for name, stretch in self._spiking.items():
            value = values.get(name)
            if value is None or not math.isfinite(value):
                continue
            limit = self.limit(name)
            if stretch.add(step, bad=value > limit):
                what = f"{name} is {value:.6g}, and its median {median(self._windows[name]):.6g}"
                found.append(BadLoss(name, stretch.first_step, step, what))
            if value <= limit:
                self._windows[name].append(value)
            elif stretch.steps >= self._rules.window_steps:
                self._windows[name].clear()  # it has been there for as long as anybody looks back
                stretch.end()
        return found

    def limit(self, column: str) -> float:
        """What is above it is too high; infinite where too little is known."""
        window = self._windows[column]
        if len(window) < self._rules.warm_steps:
            return math.inf
        middle = median(window)
        deviation = MAD_TO_DEVIATION * median([abs(value - middle) for value in window])
        deviation = max(deviation, self._rules.floor_share * abs(middle))
        # One that was always the same, and 0, has no scale.
        return middle + self._rules.deviations * deviation if deviation else math.inf


class _Stretch:
    """Bad steps in a row."""

    def __init__(self, enough: int) -> None:
        self.first_step = 0
        self.steps = 0
        self._enough = enough

    def add(self, step: int, *, bad: bool) -> bool:
        """Whether they are enough now, and were not before."""
        if not bad:
            self.end()
            return False
        if not self.steps:
            self.first_step = step
        self.steps += 1
        return self.steps == self._enough

    def end(self) -> None:
        """A good one."""
        self.steps = 0
