"""When a save falls due, so that all ranks take the same steps.

What is a pure function of the step and of constants that all ranks share needs no word between them. What is not, time
above all, becomes an appointment: rank 0 announces the step, far enough ahead, and every rank takes it there. A rank
that hears of it too late says so, and the others let go of that step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ckptd.errors import CkptdError
from ckptd_client.agreement import Store

POLL_SECONDS = 0.2
"""How often a rank looks for a new appointment, in a thread of its own."""
LEAD_SECONDS = 2.0
"""An appointment is announced at least so far ahead, by the measured duration of a step, and at least two steps."""

_log = logging.getLogger(__name__)


class Appointments:
    """Steps at which all ranks save, announced by rank 0 while the training runs.

    ``missed(step)`` is called, on the polling thread, for an appointment that this rank has already passed.
    """

    def __init__(self, store: Store, rank: int, world: int, missed: Callable[[int], None]) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._missed = missed
        self._lock = threading.Lock()
        self._steps: set[int] = set()
        self._passed = 0
        self._announced = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if rank != 0:
            self._thread = threading.Thread(target=self._poll, name="ckptd-appointments", daemon=True)
            self._thread.start()

    def announce(self, step_now: int, step_seconds: float) -> int:
        """On rank 0: all ranks save at the step that is returned."""
        ahead = 0 if self._world == 1 else max(2, int(LEAD_SECONDS / max(step_seconds, 1e-3)) + 1)
        step = step_now + ahead
        self._announced += 1
        if self._world > 1:
            self._store.put(_key(self._announced), msgspec.json.encode(step))
        with self._lock:
            self._steps.add(step)
        return step

    def due(self, step: int) -> bool:
        """Whether the save of this step was agreed on. Steps are asked for in ascending order."""
        with self._lock:
            self._passed = max(self._passed, step)
            found = step in self._steps
            self._steps = {s for s in self._steps if s > step}
            return found

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _poll(self) -> None:
        number = 1
        while not self._stop.wait(POLL_SECONDS):
            try:
                value = self._store.peek(_key(number))
            except (CkptdError, RuntimeError) as error:  # torch has no narrower type for a lost store
                _log.warning("no appointments can be heard any more: %s", error)
                return
            if value is None:
                continue
            number += 1
            step = msgspec.json.decode(value, type=int)
            with self._lock:
                late = step <= self._passed
                if not late:
                    self._steps.add(step)
            if late:
                self._missed(step)


def _key(number: int) -> str:
    return f"appointment-{number:06d}.json"


@dataclass(slots=True)
class Schedule:
    """Whether a step is to be saved."""

    every_steps: int | None
    every_seconds: float | None
    appointments: Appointments
    rank: int
    _last_seconds: float = field(default_factory=time.monotonic)
    _step_seconds: float = 0.0
    _seen: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """To be asked once for each step, in ascending order."""
        self._measure(step)
        by_step = self.every_steps is not None and step % self.every_steps == 0
        if self.every_seconds is not None and self.rank == 0:
            now = time.monotonic()
            if now - self._last_seconds >= self.every_seconds:
                self._last_seconds = now
                self.appointments.announce(step, self._step_seconds)
        return self.appointments.due(step) or by_step

    def _measure(self, step: int) -> None:
        now = time.monotonic()
        if self._seen is not None and step > self._seen[0]:
            latest = (now - self._seen[1]) / (step - self._seen[0])
            # The fastest of the recent steps decides how many of them are far enough ahead.
            before = self._step_seconds or latest
            self._step_seconds = min(latest, before * 0.9 + latest * 0.1)
        self._seen = (step, now)
