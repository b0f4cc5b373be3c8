"""The status page: where a trainer reports its progress by plain stores, without a system call.

A ring of beats. The trainer writes a beat and then the count; the daemon reads the count, then beats, and drops those
that were overwritten meanwhile.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum

STATUS_BYTES = 65536
_COUNT = struct.Struct("<Q")
_BEAT = struct.Struct("<QQQIIddd")  # number, step, monotonic ns, phase, reserved, unix seconds, loss, grad norm
_RING_START = 4096
RING_BEATS = (STATUS_BYTES - _RING_START) // 64


class Phase(IntEnum):
    """What the trainer is at. Limits for hang detection differ by phase."""

    START = 0
    STEP = 1
    SAVE = 2
    RESTORE = 3
    EVAL = 4
    COMPILE = 5
    CLOSED = 6


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of progress."""

    number: int
    """Counts from 1."""
    step: int
    monotonic_ns: int
    """``CLOCK_MONOTONIC``, which all processes of a machine share."""
    phase: Phase
    unix_seconds: float
    loss: float
    """nan where none was given."""
    grad_norm: float


class StatusPage:
    """One writer, any number of readers, no lock."""

    def __init__(self, page: memoryview) -> None:
        if len(page) != STATUS_BYTES:
            raise ValueError(f"a status page has {STATUS_BYTES} bytes, not {len(page)}")
        self._page = page

    def beat(self, step: int, phase: Phase, loss: float = float("nan"), grad_norm: float = float("nan")) -> None:
        """Report progress. Costs a clock read and two stores."""
        number = _COUNT.unpack_from(self._page, 0)[0] + 1
        slot = _RING_START + (number % RING_BEATS) * 64
        _BEAT.pack_into(self._page, slot, number, step, time.monotonic_ns(), phase, 0, time.time(), loss, grad_norm)
        _COUNT.pack_into(self._page, 0, number)

    def last(self) -> Beat | None:
        """The newest beat, or ``None`` before the first."""
        beats = self.since(self.count() - 1)
        return beats[-1] if beats else None

    def count(self) -> int:
        return int(_COUNT.unpack_from(self._page, 0)[0])

    def since(self, number: int) -> list[Beat]:
        """Beats after ``number``, oldest first; those that the ring has lost are left out."""
        newest = self.count()
        found: list[Beat] = []
        for wanted in range(max(number + 1, newest - RING_BEATS + 2, 1), newest + 1):
            slot = _RING_START + (wanted % RING_BEATS) * 64
            got, step, mono, phase, _, unix, loss, norm = _BEAT.unpack_from(self._page, slot)
            if got == wanted and phase <= Phase.CLOSED:
                found.append(Beat(got, step, mono, Phase(phase), unix, loss, norm))
        return found

    def release(self) -> None:
        self._page.release()
