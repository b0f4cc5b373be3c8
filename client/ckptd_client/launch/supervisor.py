"""One node's group of workers, seen over all of its starts: ends it whole, learns what comes next, measures it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Literal

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from ckptd.errors import CkptdError, TrainingStopped
from ckptd.wire.messages import TrainerLife
from ckptd_client.launch.council import Council, Report
from ckptd_client.launch.journal import Journal
from ckptd_client.launch.judge import Judge
from ckptd_client.launch.judge import in_words as told
from ckptd_client.launch.lookout import Lookout
from ckptd_client.launch.policy import History, RestartRules
from ckptd_client.launch.processes import all_in_words, children, end_all, exit_of
from ckptd_client.launch.recovery import died_ns, recovered
from ckptd_client.launch.rendezvous import unmet

ASK_SECONDS = 0.2
"""How often the daemon is asked for the first step of a start, and the other nodes for news."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
Look = Literal["run", "wait", "over", "regroup"]


class _Interrupted(Exception):
    """By a signal, where there is nothing to save."""


class Supervisor:
    """Belongs to the launcher's main thread, where signals arrive too."""

    def __init__(self, rules: RestartRules, lookout: Lookout, journal: Journal, *, stop_seconds: float) -> None:
        """``stop_seconds``: from a signal until whatever still runs is ended."""
        self._judge = Judge(rules, lookout, journal)
        self._lookout = lookout
        self._journal = journal
        self._stop_seconds = stop_seconds
        self._others = children()
        """Not of the group: they were there before."""
        self._council = Council.alone()
        self._stop_at: float | None = None
        """When the group is ended, once it was asked to stop."""
        self._stop_for: Literal["", "good", "join"] = ""
        """For good, or for a start with another node."""
        self._stop_asked = threading.Event()
        self._untold = ""
        """The signal of which the other nodes have not heard."""
        self._may_interrupt = False
        self._launch = ""
        self._pids: Sequence[int] = ()
        self._what: str | None = None
        """How the first workers that failed did so; ``None`` before the end."""
        self._elsewhere = ""
        """The failure of another node that this start ends of."""
        self._died_ns = self._noticed_ns = 0
        """Of the last failure; 0 where there was none, or its recovery has been told."""
        self._ask_at = self._hear_at = 0.0
        self._stepped = False
        self.outcome: CkptdError | None = None
        """Why there is no further start."""

    @property
    def history(self) -> History:
        """Of earlier failures, whichever node saw them."""
        return self._judge.history

    # A start

    @contextlib.contextmanager
    def waiting_for_others(self) -> Generator[None]:
        """While this node waits for others, a signal raises :class:`TrainingStopped`, as there is nothing to save."""
        self._listen()
        self._may_interrupt = True
        try:
            if self._stop_for == "good":
                raise _Interrupted
            yield
        except _Interrupted:
            raise self._stopped() from None
        finally:
            self._may_interrupt = False

    def starting(self, launch: str, council: Council, history: History) -> None:
        """Workers of this launch are about to be started. Raises :class:`ckptd.errors.DaemonError`."""
        self._lookout.keep_daemon()
        self._judge.history = history
        self._council = council
        self._launch, self._what, self._elsewhere, self._stepped, self._ask_at = launch, None, "", False, 0.0
        if self._stop_for == "join":
            self._stop_for, self._stop_at = "", None

    def started(self, pids: Sequence[int]) -> None:
        """They run, by local rank. A signal that came meanwhile is for them."""
        self._pids = pids
        self._listen()
        self._journal.tell("started", f"{len(pids)} workers of launch {self._launch}", launch=self._launch)
        if self._stop_asked.is_set():
            self._pass_on()

    def look(self) -> Look:
        """``wait``: some have stopped as they were asked to, the others are to have their time. ``over``: at least one
        has failed or all have stopped, and nothing of the group is left; ``regroup``: likewise, for another node."""
        self._tell_and_hear()
        codes = [exit_of(pid) for pid in self._pids]
        ended = [(rank, code) for rank, code in enumerate(codes) if code is not None]
        stopped = [rank for rank, code in ended if code == TrainingStopped.exit_code]
        if stopped and self._stop_at is None:
            self._tell_and_hear(at_once=True)
            if self._stop_at is None:  # a rank was asked, and no launcher
                self._council.tell("stopping", f"local rank {stopped[0]} has stopped")
                self._stop_by("good")
        if self._stop_at is not None:
            late = time.monotonic() >= self._stop_at
            if len(ended) < len(codes) and not late and not self._elsewhere:
                return "wait"
            if len(ended) < len(codes) or any(code != 0 for _, code in ended):
                self._end(ended)
                return "regroup" if self._stop_for == "join" and not self._elsewhere else "over"
            return "run"
        bad = [(rank, code) for rank, code in ended if code != 0]
        if bad or self._elsewhere:
            if not self._elsewhere:
                self._council.tell("failed", all_in_words(bad))
            self._end(bad)
            return "over"
        self._tell_first_step(at_once=len(ended) == len(codes))
        return "run"

    def regroup(self) -> Look:
        """Another node waits to join: have all workers save and stop. Returns when they have; see :meth:`look`.
        ``run``: the training was done before it came to that."""
        if not self._stop_for:
            self._council.tell("joining", "another node waits to join")
            self._make_room("another node waits to join")
        while (found := self.look()) == "wait":
            time.sleep(ASK_SECONDS)
        return found

    def _make_room(self, why: str) -> None:
        self._journal.tell("joining", f"{why}: workers have {self._stop_seconds:g} s for a last save")
        self._stop_by("join")
        self._pass_on()

    def _end(self, ended: Sequence[tuple[int, int | None]]) -> None:
        if self._what is None:
            self._noticed_ns = time.monotonic_ns()
            self._what = all_in_words(ended)
        end_all(self._pids, self._others)

    def clear(self) -> None:
        """End whatever the group has left behind."""
        end_all(self._pids, self._others)

    # Other nodes

    def _tell_and_hear(self, *, at_once: bool = False) -> None:
        if self._untold:
            self._council.tell("stopping", self._untold)
            self._untold = ""
        if self._council.nodes == 1 or (time.monotonic() < self._hear_at and not at_once):
            return
        self._hear_at = time.monotonic() + ASK_SECONDS
        for news in self._council.hear():
            if news.what == "failed":
                self._elsewhere = self._elsewhere or f"node {news.node}: {news.text}"
            elif news.what == "joining" and not self._stop_for:
                self._make_room(f"node {news.node}: {news.text}")
            elif news.what == "stopping" and self._stop_for != "good":
                self._journal.tell("stopping", f"node {news.node}: {news.text}", node=news.node)
                self._stop_by("good")
                self._pass_on()

    def left_alone(self, error: Exception) -> CkptdError:
        """What it means that a rendezvous did not come about."""
        self._tell_and_hear(at_once=True)
        if self._stop_for == "good":
            return self._stopped()
        if not self._launch or isinstance(error, RendezvousClosedError):
            return unmet(error)
        self._stop_by("good")
        safe, saved = self._settle()
        self._journal.tell("lost", f"no further start with the other nodes is possible; {saved}", safe=safe)
        return unmet(error, saved)

    # What comes next

    def again(self) -> bool:
        """After a failure, with nothing of the group left: whether to start anew, once the time for it has come. The
        same on all nodes."""
        if self._stop_for == "good":
            self._council.report(Report(stopping=True))
            self.outcome = self._stopped()
            return False
        self._tell_first_step(at_once=True)
        report = self._report()
        self._journal.tell("failed", self._elsewhere or told(report), launch=self._launch, last_step=report.last_step)
        for message in self._lookout.alerts(self._launch):  # it may be the daemon that has ended the workers
            self._journal.tell("alert", f"the daemon tells: {message}", launch=self._launch)
        ruling = self._council.settle(report, lambda all_: self._judge.rule(self._launch, all_, self._council.nodes))
        self._judge.history = ruling.history
        self.outcome = ruling.outcome
        if self.outcome is None and ruling.wait_seconds:
            self._journal.tell("waiting", f"{ruling.wait_seconds:.1f} s before the next start")
            self._wait(ruling.wait_seconds)
        if isinstance(self.outcome, TrainingStopped):  # another node was asked
            self._stop_by("good")
            self.outcome = None
        if self.outcome is None and self._stop_asked.is_set():
            self.outcome = self._stopped()
        return self.outcome is None

    def _wait(self, seconds: float) -> None:
        """Or until this or another node is asked to stop."""
        until = time.monotonic() + seconds
        while self._stop_for != "good" and (left := until - time.monotonic()) > 0:
            self._stop_asked.wait(min(left, ASK_SECONDS))
            self._tell_and_hear()
        self._tell_and_hear(at_once=True)

    def _report(self) -> Report:
        lives = self._lookout.lives(self._launch) or ()
        self._died_ns = died_ns(lives, self._noticed_ns)
        steps = [life.last_step for life in lives if life.steps]
        return Report(
            what=self._what or ("" if self._elsewhere else "the group failed"),
            died_unix_seconds=time.time() - (time.monotonic_ns() - self._died_ns) / 1e9,
            stepped=bool(steps) or self._stepped,
            last_step=max(steps, default=None),
        )

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

    def _listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._stop_for != "good":
            self._untold = name
            self._stop_by("good")
            words = f"{name}: workers have {self._stop_seconds:g} s for a last save"
            self._journal.tell("stopping", words, signal=name)
            self._pass_on()
        elif number == signal.SIGINT:  # pressed twice
            self._stop_at = time.monotonic()
        if self._may_interrupt:
            self._may_interrupt = False  # once
            raise _Interrupted

    def _stop_by(self, why: Literal["good", "join"]) -> None:
        """A stop for good goes before one for another node, and keeps its time."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_seconds
        self._stop_for = why
        if why == "good":
            self._stop_asked.set()

    def _pass_on(self) -> None:
        for pid in self._pids:
            if exit_of(pid) is None:  # not reaped, so the number is still its own
                os.kill(pid, signal.SIGTERM)

    def _stopped(self) -> TrainingStopped:
        self._tell_and_hear()
        safe, saved = self._settle()
        how = "before a start" if self._what is None else self._what or "workers did not stop in time"
        self._journal.tell("stopped", f"{how}; {saved}", safe=safe)
        return TrainingStopped(f"stopped as asked; {saved}", hint="start it again, and it goes on")

    def _settle(self) -> tuple[bool, str]:
        """Whether what was sealed is committed, within the time for a stop; and that in words."""
        left = max((self._stop_at or 0.0) - time.monotonic(), 0.0)
        return self._lookout.settle(left) if self._launch else (True, "nothing was sealed")
