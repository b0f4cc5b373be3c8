"""The pulse: what the training thread says of its progress, and in which phase it is."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Generator
from typing import Literal

from ckptd.errors import ConfigError, ResourceError
from ckptd.pulse.levers import Levers
from ckptd.pulse.page import LIMIT_SECONDS_MAX, MappedPage, Phase, create_page

_log = logging.getLogger(__name__)

PhaseName = Literal["eval", "compile", "save", "restore", "other"]
Part = Literal["page", "stacks", "dump", "end"]
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
    """One life of a trainer, on a status page of its own, with the levers of its process. Written by the training
    thread alone: a side thread that lives says nothing of the training. :meth:`close` gives all back."""

    def __init__(self) -> None:
        """Raises :class:`ckptd.errors.ResourceError` where there are no descriptors left."""
        self._levers = _levers()
        self._fd = create_page()
        self._page = MappedPage(self._fd, writable=True)
        self._stays: list[_Stay] = []
        self._between = _Stay(Phase.START, 0.0)
        self._step = 0
        self._closed = False
        self._beat()

    def parts(self) -> list[tuple[Part, int]]:
        """What the daemon needs, each with its descriptor, in this order."""
        page: tuple[Part, int] = ("page", self._fd)
        if (levers := self._levers) is None:
            return [page]
        return [("stacks", levers.stacks), ("dump", levers.dump), ("end", levers.end), page]

    @property
    def dump_signal(self) -> int:
        """See :class:`Levers`; 0 where there are none."""
        return 0 if self._levers is None else self._levers.signal

    def opened(self, generation: int) -> None:
        """The life of the run in which this trainer saves."""
        self._page.generation = generation

    def step(self, step: int, loss: float | None = None, grad_norm: float | None = None) -> None:
        """A training step is done. Ends every phase: one whose end was lost is over by then."""
        self._stays.clear()
        self._between.phase = Phase.STEP
        self._step = step
        self._page.beat(
            step, Phase.STEP, math.nan if loss is None else loss, math.nan if grad_norm is None else grad_norm
        )

    @contextlib.contextmanager
    def phase(self, phase: Phase, limit_seconds: float = 0.0) -> Generator[None]:
        """What happens inside takes the time of this phase and not of a step. Phases may be nested."""
        stay = _Stay(phase, limit_seconds)
        self._stays.append(stay)
        self._beat()
        try:
            yield
        finally:
            if stay in self._stays:
                del self._stays[self._stays.index(stay) :]
                self._beat()

    def _beat(self) -> None:
        if not self._closed:
            stay = self._stays[-1] if self._stays else self._between
            self._page.beat(self._step, stay.phase, limit_seconds=stay.limit_seconds)

    def forget(self) -> None:
        """In a forked child: the life is the parent's. The levers stay, so that the child can dump its stacks too."""
        if not self._closed:
            self._closed = True
            self._page.close()
            os.close(self._fd)

    def close(self) -> None:
        """Say that this life ends as it should. Idempotent."""
        if not self._closed:
            self._closed = True
            self._page.beat(self._step, Phase.CLOSED)
            self._page.close()
            os.close(self._fd)
            if self._levers is not None:
                self._levers.release()


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
