"""Whether a group that failed is started anew, from where, and when. Pure: failures in, decisions out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ckptd.errors import CkptdError, CrashLoop, NeverStarted, RestartsUsedUp

SAME_STEP = 1
"""Failures this many steps from each other are at the same step: ranks do not die in the same instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """Fixed for the life of a launcher."""

    restarts_max: int = 10
    """Within ``window_seconds``."""
    window_seconds: float = 3600.0
    same_step_max: int = 3
    """Failures in a row at the same step; then the checkpoint they came from is doubted."""
    back_max: int = 2
    """So often the restart goes one checkpoint back, before any progress; then it is a crash loop."""
    unstarted_max: int = 3
    """Starts in a row that may fail before their first step, where an earlier one had come so far."""
    backoff_seconds: float = 1.0
    """Before the second restart within the window, at random from nothing to this; doubled for each further one."""
    backoff_seconds_max: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one start of the group ended."""

    at_seconds: float
    """By any clock that all failures are told by."""
    what: str
    """In words, for people: which rank, how."""
    stepped: bool
    """It had done a step."""
    last_step: int | None = None
    """``None``: none, or not known."""


@dataclass(slots=True, kw_only=True)
class History:
    """What is remembered of earlier failures. Plain data: a node that joins is told."""

    restarts: list[float] = field(default_factory=list[float])
    """When, within the window."""
    stepped: bool = False
    """Any start had done a step."""
    unstarted: int = 0
    """So many failures in a row came before the first step."""
    at: int | None = None
    """The last step before the newest failure of which it is known, and how many in a row were there."""
    repeats: int = 0
    went_back: int = 0
    """So often, since there was progress."""
    furthest: int = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """``back``: restart, one checkpoint further back. ``error``: why to stop."""

    what: Literal["restart", "back", "stop"]
    wait_seconds: float = 0.0
    error: CkptdError | None = None


class Policy:
    """Judges by its rules and :attr:`history`."""

    def __init__(
        self, rules: RestartRules, backoff: Callable[[int, float, float], float], history: History | None = None
    ) -> None:
        """``backoff``: number, first and longest seconds → how long to wait; see :mod:`ckptd.jitter`."""
        self.history = history or History()
        self._rules = rules
        self._backoff = backoff

    def judge(self, failure: Failure) -> Decision:
        """What is to be done about the newest failure, which becomes history."""
        rules, history = self._rules, self.history
        history.unstarted = 0 if failure.stepped else history.unstarted + 1
        history.stepped |= failure.stepped
        if not history.stepped:
            return _stop(
                NeverStarted(f"{failure.what}, before the first step", hint="its own message says why; not restarted")
            )
        if history.unstarted >= rules.unstarted_max:
            return _stop(
                NeverStarted(f"{history.unstarted} starts in a row failed before their first step: {failure.what}")
            )
        what = "restart"
        if failure.last_step is not None and self._repeated(failure.last_step) >= rules.same_step_max:
            if history.went_back >= rules.back_max:
                return _stop(self.crash_loop(failure))
            what, history.repeats = "back", 0
            history.went_back += 1
        history.restarts = [at for at in history.restarts if failure.at_seconds - at <= rules.window_seconds]
        number = len(history.restarts)
        if number >= rules.restarts_max:
            return _stop(
                RestartsUsedUp(
                    f"{failure.what}; restarted {number} times within {rules.window_seconds:g} s",
                    hint="start it again to go on, or allow more by --max-restarts",
                )
            )
        history.restarts.append(failure.at_seconds)
        wait = self._backoff(number, rules.backoff_seconds, rules.backoff_seconds_max) if number else 0.0
        return Decision("back" if what == "back" else "restart", wait)

    def crash_loop(self, failure: Failure) -> CrashLoop:
        """Why there is no use in going on."""
        return CrashLoop(
            f"{failure.what}; and so again and again, from {self.history.went_back} older checkpoints too",
            hint="the data or the code of that step, not a checkpoint; `ckptd show` has the marks",
        )

    def _repeated(self, last_step: int) -> int:
        """How many failures in a row there were at this step."""
        history = self.history
        if last_step > history.furthest + SAME_STEP:
            history.went_back = 0
        history.furthest = max(history.furthest, last_step)
        same = history.at is not None and abs(last_step - history.at) <= SAME_STEP
        history.repeats = history.repeats + 1 if same else 1
        history.at = last_step
        return history.repeats


def _stop(error: CkptdError) -> Decision:
    return Decision("stop", error=error)
