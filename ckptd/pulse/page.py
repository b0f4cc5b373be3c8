"""The status page: where a trainer reports its progress by plain stores, without a system call.

A ring of beats. The trainer writes a beat and then the count; the daemon reads the count, then beats, and drops those
that were overwritten meanwhile. One page is one life of a trainer: it is made with the process's session and never
taken over by another, so what an earlier life left behind cannot be taken for this one's.
"""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from ckptd.pulse.sealed import create_sealed, map_sealed

STATUS_BYTES = 65536
_COUNT = struct.Struct("<Q")
_GENERATION_AT = 8
_LIFE_AT, _LIFE_BYTES = 16, 16
_BEAT = struct.Struct("<QQQIIddd")  # number, step, monotonic ns, phase, limit ms, unix seconds, loss, grad norm
_put_beat, _put_count = _BEAT.pack_into, _COUNT.pack_into
_RING_START = 4096
RING_BEATS = (STATUS_BYTES - _RING_START) // 64
LIMIT_SECONDS_MAX = (2**32 - 1) / 1000
"""The longest limit of a phase that a page can hold: about 49 days."""
_NAN = math.nan


class Phase(IntEnum):
    """What the trainer is at. Limits for hang detection differ by phase."""

    START = 0
    STEP = 1
    SAVE = 2
    RESTORE = 3
    EVAL = 4
    COMPILE = 5
    CLOSED = 6
    OTHER = 7


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
    limit_seconds: float = 0.0
    """How long the phase may last by the trainer's own word; 0 where it gave none."""


class StatusPage:
    """One writer, any number of readers, no lock."""

    def __init__(self, page: memoryview) -> None:
        if len(page) != STATUS_BYTES:
            raise ValueError(f"a status page has {STATUS_BYTES} bytes, not {len(page)}")
        self._page = page
        self._number = self.count()
        """Of the beat that was written last."""

    def beat(
        self, step: int, phase: Phase, loss: float = _NAN, grad_norm: float = _NAN, limit_seconds: float = 0.0
    ) -> None:
        """Report progress. Costs two clock reads and two stores."""
        self.beat_at(time.monotonic_ns(), time.time(), step, phase, loss, grad_norm, int(limit_seconds * 1000))

    def beat_at(
        self,
        monotonic_ns: int,
        unix_seconds: float,
        step: int,
        phase: Phase,
        loss: float,
        grad_norm: float,
        limit_ms: int = 0,
    ) -> None:
        """As :meth:`beat`, by clocks that the caller has just read."""
        self._number = number = self._number + 1
        slot = _RING_START + number % RING_BEATS * 64
        _put_beat(self._page, slot, number, step, monotonic_ns, phase, limit_ms, unix_seconds, loss, grad_norm)
        _put_count(self._page, 0, number)

    @property
    def life(self) -> str:
        """Which life of a trainer this is, in 32 hexadecimal digits."""
        return bytes(self._page[_LIFE_AT : _LIFE_AT + _LIFE_BYTES]).hex()

    @property
    def generation(self) -> int:
        """In which this life saves; 0 before it is known."""
        return int(_COUNT.unpack_from(self._page, _GENERATION_AT)[0])

    @generation.setter
    def generation(self, generation: int) -> None:
        _COUNT.pack_into(self._page, _GENERATION_AT, generation)

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
            got, step, mono, phase, limit, unix, loss, norm = _BEAT.unpack_from(self._page, slot)
            if got == wanted and phase <= Phase.OTHER:
                found.append(Beat(got, step, mono, Phase(phase), unix, loss, norm, limit / 1000))
        return found

    def release(self) -> None:
        self._page.release()


class MappedPage(StatusPage):
    """A status page in memory that two processes share. Owns its mapping; :meth:`close` gives it back."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map the page behind ``fd``, which stays the caller's. Raises as :func:`map_sealed`."""
        self._mmap = map_sealed(fd, STATUS_BYTES, "a status page", writable=writable)
        super().__init__(memoryview(self._mmap))

    def close(self) -> None:
        """Idempotent."""
        self.release()
        self._mmap.close()


def create_page() -> int:
    """A descriptor of a new page, with a life of its own. Raises :class:`ResourceError`."""
    fd = create_sealed("status", STATUS_BYTES)
    os.pwrite(fd, os.urandom(_LIFE_BYTES), _LIFE_AT)
    return fd
