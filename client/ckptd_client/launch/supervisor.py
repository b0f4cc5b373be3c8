"""One node's group of workers, seen over all of its starts: ends it whole, decides what comes next, measures it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Literal

from ckptd.errors import CkptdError, CrashLoop, TrainingStopped
from ckptd.jitter import backoff_seconds
from ckptd.wire.messages import TrainerLife
from ckptd_client.launch.journal import Journal
from ckptd_client.launch.lookout import Lookout
from ckptd_client.launch.policy import Failure, Policy, RestartRules
from ckptd_client.launch.processes import children, end_all, exit_of, in_words
from ckptd_client.launch.recovery import died_ns, recovered

ASK_SECONDS = 0.2
"""How often the daemon is asked for the first step of a start."""
SECOND_SIGNAL_EXIT = 130
Look = Literal["run", "wait", "over"]


class Supervisor:
    """Belongs to the launcher's main thread, where signals arrive too."""

    def __init__(self, rules: RestartRules, lookout: Lookout, journal: Journal, *, stop_seconds: float) -> None:
        """``stop_seconds``: from a signal until whatever still runs is ended."""
        self._policy = Policy(rules, backoff_seconds)
        self._lookout = lookout
        self._journal = journal
        self._stop_seconds = stop_seconds
        self._others = children()
        """Not of the group: they were there before."""
        self._stop_at: float | None = None
        """When the group is ended, once it was asked to stop."""
        self._stop_asked = threading.Event()
        self._launch = ""
        self._pids: Sequence[int] = ()
        self._what = ""
        """How the first worker that failed did so."""
        self._died_ns = self._noticed_ns = 0
        """Of the last failure; 0 where there was none, or its recovery has been told."""
        self._ask_at = 0.0
        self._stepped = False
        self.outcome: CkptdError | None = None
        """Why there is no further start."""

    # A start

    def starting(self, launch: str) -> None:
        """Workers of this launch are about to be started. Raises :class:`ckptd.errors.DaemonError`."""
        self._lookout.keep_daemon()
        self._launch, self._what, self._stepped, self._ask_at = launch, "", False, 0.0

    def started(self, pids: Sequence[int]) -> None:
        """They run, by local rank. A signal that came meanwhile is for them."""
        self._pids = pids
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._signalled)
        self._journal.tell("started", f"{len(pids)} workers of launch {self._launch}", launch=self._launch)
        if self._stop_asked.is_set():
            self._pass_on()

    def look(self) -> Look:
        """``wait``: some have stopped as they were asked to, the others are to have their time. ``over``: at least one
        has failed or all have stopped, and nothing of the group is left."""
        codes = [exit_of(pid) for pid in self._pids]
        ended = [(rank, code) for rank, code in enumerate(codes) if code is not None]
        stopped = [rank for rank, code in ended if code == TrainingStopped.exit_code]
        if stopped and self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_seconds
        if self._stop_at is not None:
            late = time.monotonic() >= self._stop_at
            if len(ended) < len(codes) and not late:
                return "wait"
            if any(code != 0 for _, code in ended) or late:
                self._end(ended)
                return "over"
            return "run"
        if bad := [(rank, code) for rank, code in ended if code != 0]:
            self._end(bad)
            return "over"
        self._tell_first_step(at_once=len(ended) == len(codes))
        return "run"

    def _end(self, ended: Sequence[tuple[int, int | None]]) -> None:
        if not self._what:
            self._noticed_ns = time.monotonic_ns()
            words = [f"local rank {rank} {in_words(code)}" for rank, code in ended if code]
            self._what = "; ".join(words[:4]) or "workers did not stop in time"
        end_all(self._pids, self._others)

    def clear(self) -> None:
        """End whatever the group has left behind."""
        end_all(self._pids, self._others)

    # What comes next

    def again(self) -> bool:
        """After a failure, with nothing of the group left: whether to start anew, once the time for it has come."""
        if self._stop_at is not None:
            self.outcome = self._stopped()
            return False
        self._tell_first_step(at_once=True)
        failure = self._failure()
        self._journal.tell("failed", self._told(failure), launch=self._launch, last_step=failure.last_step)
        decision = self._policy.judge(failure)
        self.outcome = decision.error
        if decision.what == "back":
            self.outcome = self._go_back(failure)
        if self.outcome is None and decision.wait_seconds:
            self._journal.tell("waiting", f"{decision.wait_seconds:.1f} s before the next start")
            self._stop_asked.wait(decision.wait_seconds)
        if self.outcome is None and self._stop_at is not None:
            self.outcome = self._stopped()
        return self.outcome is None

    def _failure(self) -> Failure:
        lives = self._lookout.lives(self._launch) or ()
        self._died_ns = died_ns(lives, self._noticed_ns)
        steps = [life.last_step for life in lives if life.steps]
        return Failure(
            at_seconds=time.monotonic(),
            what=self._what or "the group failed",
            stepped=bool(steps) or self._stepped,
            last_step=max(steps, default=None),
        )

    def _told(self, failure: Failure) -> str:
        at = "before its first step" if not failure.stepped else f"after step {failure.last_step}"
        return f"{failure.what}, {at}" if failure.last_step is not None or not failure.stepped else failure.what

    def _go_back(self, failure: Failure) -> CkptdError | None:
        """Have the checkpoint doubted that this start came from. An error where there is none to go back to."""
        reason = f"restored, and then: {self._told(failure)}, again and again"
        try:
            version = self._lookout.doubt(self._launch, reason)
        except CkptdError as error:
            self._journal.tell("not_doubted", f"the checkpoint could not be marked as suspect: {error}")
            return None
        if not version:
            return CrashLoop(f"{self._told(failure)}, again and again, and no checkpoint is to blame: it began anew")
        self._journal.tell("doubted", f"marked {version} as suspect: going one checkpoint back", version=version)
        return None

    def _tell_first_step(self, *, at_once: bool = False) -> None:
        """Ask the daemon, until each worker has done a step."""
        if self._stepped or (time.monotonic() < self._ask_at and not at_once):
            return
        self._ask_at = time.monotonic() + ASK_SECONDS
        lives = list({life.rank: life for life in self._lookout.lives(self._launch) or ()}.values())
        if len(lives) < len(self._pids) or not all(life.steps for life in lives):
            return
        self._stepped = True
        if self._died_ns:
            self._tell_recovery(lives)
        self._died_ns = 0

    def _tell_recovery(self, lives: Sequence[TrainerLife]) -> None:
        recovery = recovered(self._died_ns, self._noticed_ns, lives)
        self._journal.tell("recovered", f"{recovery}", launch=self._launch, **recovery.plain())

    # Stopping

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_seconds
            self._journal.tell(
                "stopping", f"{name}: workers have {self._stop_seconds:g} s for a last save", signal=name
            )
            self._pass_on()
        elif number == signal.SIGINT:  # pressed twice
            self._stop_at = time.monotonic()
        self._stop_asked.set()

    def _pass_on(self) -> None:
        for pid in self._pids:
            if exit_of(pid) is None:  # not reaped, so the number is still its own
                os.kill(pid, signal.SIGTERM)

    def _stopped(self) -> CkptdError:
        left = max((self._stop_at or 0.0) - time.monotonic(), 0.0)
        safe = self._lookout.settle(left)
        saved = "all that was sealed is committed" if safe else "the daemon still writes what was sealed: let it live"
        self._journal.tell("stopped", f"{self._what or 'before a start'}; {saved}", safe=safe)
        return TrainingStopped(f"stopped as asked; {saved}", hint="start it again, and it goes on")
