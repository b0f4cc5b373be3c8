"""When a save falls due, so that all ranks take the same steps.

What is a pure function of the step and of constants that all ranks share needs no word between them. What is not, time
above all, becomes an appointment: rank 0 announces the step, far enough ahead, and every rank takes it there. A rank
that hears of it too late says so, and the others let go of that step. Nor is the end of a training one: a signal may
reach any single rank. It asks rank 0, and the appointment is the last one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ckptd.errors import CkptdError, ConfigError
from ckptd_client.meeting import Store
from ckptd_client.stopping import Asked

POLL_SECONDS = 0.2
"""How often a rank looks for a new appointment, in a thread of its own."""
LEAD_SECONDS = 2.0
"""An appointment is announced at least so far ahead, by the measured duration of a step, and at least two steps."""

_log = logging.getLogger(__name__)


class Appointments:
    """Steps at which all ranks save, announced by rank 0 while the training runs.

    ``missed(step)`` is called, on the polling thread, for an appointment that this rank has already passed.
    ``asked``: whether this process was asked to stop.
    """

    def __init__(self, store: Store, rank: int, world: int, missed: Callable[[int], None], asked: Asked) -> None:
        self._store = store
        self._rank = rank
        self.between_ranks = world > 1
        """Others have to hear of them in time."""
        self._missed = missed
        self._asked = asked
        self._asked_elsewhere = False
        self.last_step: int | None = None
        """After which all ranks stop."""
        self._lock = threading.Lock()
        self._steps: set[int] = set()
        self._passed = 0
        self._announced = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self.between_ranks:
            poll = self._poll if rank else self._await_wish
            self._thread = threading.Thread(target=poll, name="ckptd-appointments", daemon=True)
            self._thread.start()

    def announce(self, step_now: int, step_seconds: float, *, last: bool = False) -> int:
        """On rank 0: all ranks save at the step that is returned; ``last``: and stop there."""
        ahead = max(2, int(LEAD_SECONDS / max(step_seconds, 1e-3)) + 1) if self.between_ranks else 0
        step = step_now + ahead
        self._announced += 1
        if self.between_ranks:
            self._store.put(_key(self._announced), msgspec.json.encode((step, last)))
        with self._lock:
            self._steps.add(step)
            self.last_step = step if last else self.last_step
        return step

    def due(self, step: int) -> bool:
        """Whether the save of this step was agreed on. Steps are asked for in ascending order."""
        if self._thread is None and not self._steps:  # nobody else adds to them
            return False
        with self._lock:
            self._passed = step
            found = step in self._steps
            self._steps = {s for s in self._steps if s > step}
            return found

    def stops(self, step: int) -> bool:
        """Whether the training ends after this step."""
        return self.last_step is not None and step >= self.last_step

    def stop_if_asked(self, step_now: int, step_seconds: float) -> None:
        """On rank 0, at each step: announce the last one, once, where any rank was asked to stop."""
        if self.last_step is None and (self._asked.by or self._asked_elsewhere):
            step = self.announce(step_now, step_seconds, last=True)
            _log.warning("asked to stop: all ranks save step %d, and end there", step)

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _await_wish(self) -> None:
        """On rank 0: hear of another rank that was asked to stop."""
        while not self._stop.wait(POLL_SECONDS) and not self._asked_elsewhere and self.last_step is None:
            try:
                self._asked_elsewhere = self._store.peek(STOP_KEY) is not None
            except (CkptdError, RuntimeError) as error:
                _log.warning("no wish of another rank to stop can be heard any more: %s", error)
                return

    def _pass_on(self) -> bool:
        """On another rank: tell rank 0 that this one was asked to stop. Whether that is done with."""
        if self._asked.by:
            with contextlib.suppress(ConfigError):  # another rank was asked too
                self._store.put(STOP_KEY, b"1")
            return True
        return False

    def _poll(self) -> None:
        number, told = 1, False
        while not self._stop.wait(POLL_SECONDS):
            try:
                told = told or self._pass_on()
                value = self._store.peek(_key(number))
            except (CkptdError, RuntimeError) as error:  # torch has no narrower type for a lost store
                _log.warning("no appointments can be heard any more: %s", error)
                return
            if value is None:
                continue
            number += 1
            step, last = msgspec.json.decode(value, type=tuple[int, bool])
            with self._lock:
                self.last_step = step if last else self.last_step
                late = step <= self._passed
                if not late:
                    self._steps.add(step)
            if late:
                self._missed(step)


STOP_KEY = "stop.json"


def _key(number: int) -> str:
    return f"appointment-{number:06d}.json"


@dataclass(slots=True)
class Schedule:
    """Whether a step is to be saved."""

    every_steps: int | None
    every_seconds: float | None
    appointments: Appointments
    rank: int
    _last_ns: int = field(default_factory=time.monotonic_ns)
    _step_seconds: float = 0.0
    _seen: tuple[int, int] | None = None

    def due(self, step: int, now_ns: int) -> bool:
        """To be asked once for each step, in ascending order. ``now_ns``: by ``CLOCK_MONOTONIC``."""
        by_step = self.every_steps is not None and step % self.every_steps == 0
        if self.rank == 0:
            if self.appointments.between_ranks:
                self._measure(step, now_ns)
            if self.every_seconds is not None and now_ns - self._last_ns >= self.every_seconds * 1e9:
                self._last_ns = now_ns
                self.appointments.announce(step, self._step_seconds)
            self.appointments.stop_if_asked(step, self._step_seconds)
        return self.appointments.due(step) or by_step

    def _measure(self, step: int, now_ns: int) -> None:
        if self._seen is not None and step > self._seen[0]:
            latest = (now_ns - self._seen[1]) / (step - self._seen[0]) / 1e9
            # The fastest of the recent steps decides how many of them are far enough ahead.
            before = self._step_seconds or latest
            self._step_seconds = min(latest, before * 0.9 + latest * 0.1)
        self._seen = (step, now_ns)
