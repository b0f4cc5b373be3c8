"""The pulse: what the training thread says of its progress, and in which phase it is."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Generator, Mapping
from typing import Literal

from ckptd.errors import ConfigError, ResourceError
from ckptd.pulse.levers import Levers
from ckptd.pulse.page import LIMIT_SECONDS_MAX, MappedPage, Phase, create_page
from ckptd.pulse.rows import MappedRows, create_rows

_log = logging.getLogger(__name__)

PhaseName = Literal["eval", "compile", "save", "restore", "other"]
Part = Literal["page", "stacks", "dump", "end", "rows"]
_STEP = Phase.STEP
_PHASES: dict[str, Phase] = {
    phase.name.lower(): phase for phase in (Phase.EVAL, Phase.COMPILE, Phase.SAVE, Phase.RESTORE, Phase.OTHER)
}


class _Stay:
    """One stay in a phase."""

    __slots__ = ("limit_seconds", "phase")

    def __init__(self, phase: Phase, limit_seconds: float) -> None:
        self.phase = phase
        self.limit_seconds = limit_seconds


class Pulse:
    """One life of a trainer, on a status page of its own, with the levers of its process, and the rows of its training
    log. Written by the training thread alone: a side thread that lives says nothing of the training. :meth:`close`
    gives all back."""

    def __init__(self, *, logs: bool = True) -> None:
        """``logs``: with rows. Raises :class:`ckptd.errors.ResourceError` where there are no descriptors left."""
        self._levers = _levers()
        self._rows_fd = create_rows() if logs else -1
        self._rows = MappedRows(self._rows_fd, writable=True) if logs else None
        self._fd = create_page()
        self._page = MappedPage(self._fd, writable=True)
        self._stays: list[_Stay] = []
        self._between = _Stay(Phase.START, 0.0)
        self._step = 0
        self._stepped_ns = 0
        """When the last step was done; 0 before the first."""
        self._left_ns = 0
        """Since when it is in another phase than a step."""
        self._away_ns = 0
        """How long it was in others since the last step."""
        self._closed = False
        self._beat()

    def parts(self) -> list[tuple[Part, int]]:
        """What the daemon needs, each with its descriptor, in this order."""
        parts: list[tuple[Part, int]] = [("page", self._fd)]
        if self._rows is not None:
            parts.insert(0, ("rows", self._rows_fd))
        if (levers := self._levers) is None:
            return parts
        return [("stacks", levers.stacks), ("dump", levers.dump), ("end", levers.end), *parts]

    @property
    def dump_signal(self) -> int:
        """See :class:`Levers`; 0 where there are none."""
        return 0 if self._levers is None else self._levers.signal

    def opened(self, generation: int) -> None:
        """The life of the run in which this trainer saves."""
        self._page.generation = generation
        if self._rows is not None:
            self._rows.generation = generation

    def step(self, step: int, loss: float = math.nan, grad_norm: float = math.nan) -> float:
        """A training step is done. Ends every phase: one whose end was lost is over by then. Returns the seconds that
        it took, without other phases within; nan for the first."""
        return self.step_at(time.monotonic_ns(), time.time(), step, loss, grad_norm)

    def step_at(self, now_ns: int, unix_seconds: float, step: int, loss: float, grad_norm: float) -> float:
        """As :meth:`step`, by clocks that the caller has just read: ``CLOCK_MONOTONIC``, and that of the day."""
        if self._stays:
            self._away_ns += now_ns - self._left_ns
            self._stays.clear()
        began_ns = self._stepped_ns + self._away_ns
        seconds = (now_ns - began_ns) / 1e9 if self._stepped_ns and now_ns >= began_ns else math.nan
        self._stepped_ns, self._away_ns = now_ns, 0
        self._between.phase = _STEP
        self._step = step
        self._page.beat_at(now_ns, unix_seconds, step, _STEP, loss, grad_norm)
        return seconds

    def log(self, step: int, values: Mapping[str, float], unix_seconds: float, step_seconds: float) -> None:
        """A row of the training log: what a step has reported, and how long it took."""
        if self._rows is not None and not self._closed:
            self._rows.write(step, values, unix_seconds, step_seconds)

    @contextlib.contextmanager
    def phase(self, phase: Phase, limit_seconds: float = 0.0) -> Generator[None]:
        """What happens inside takes the time of this phase and not of a step. Phases may be nested."""
        stay = _Stay(phase, limit_seconds)
        if not self._stays:
            self._left_ns = time.monotonic_ns()
        self._stays.append(stay)
        self._beat()
        try:
            yield
        finally:
            if stay in self._stays:
                del self._stays[self._stays.index(stay) :]
                if not self._stays:
                    self._away_ns += time.monotonic_ns() - self._left_ns
                self._beat()

    def _beat(self) -> None:
        if not self._closed:
            stay = self._stays[-1] if self._stays else self._between
            self._page.beat(self._step, stay.phase, limit_seconds=stay.limit_seconds)

    def forget(self) -> None:
        """In a forked child: the life is the parent's. The levers stay, so that the child can dump its stacks too."""
        if not self._closed:
            self._closed = True
            self._give_back()

    def close(self) -> None:
        """Say that this life ends as it should. Idempotent."""
        if not self._closed:
            self._closed = True
            self._page.beat(self._step, Phase.CLOSED)
            self._give_back()
            if self._levers is not None:
                self._levers.release()

    def _give_back(self) -> None:
        self._page.close()
        os.close(self._fd)
        if self._rows is not None:
            self._rows.close()
            os.close(self._rows_fd)


def _levers() -> Levers | None:
    """A training goes on without; only its stacks cannot be had, nor can it be ended from afar."""
    try:
        return Levers.acquire()
    except ResourceError as error:
        _log.warning("%s", error)
        return None


def phase_named(name: str, limit_seconds: float | None) -> tuple[Phase, float]:
    """A phase as a caller names it. Raises :class:`ConfigError` for a name or a limit that is none."""
    phase = _PHASES.get(name)
    if phase is None:
        raise ConfigError(f"there is no phase {name!r}", hint=f"one of {', '.join(sorted(_PHASES))}")
    if limit_seconds is None:
        return phase, 0.0
    if not 0 < limit_seconds <= LIMIT_SECONDS_MAX:
        raise ConfigError(f"limit_seconds={limit_seconds} is not between 0 and {LIMIT_SECONDS_MAX:.0f}")
    return phase, max(limit_seconds, 0.001)
