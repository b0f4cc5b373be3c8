"""One life of a trainer as the daemon sees it: its page, its levers, and how it has been getting on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections import deque
from typing import Literal

from ckptd.daemon.owner import Owner
from ckptd.daemon.watch.lives import Course
from ckptd.daemon.watch.rules import WARM_STEPS
from ckptd.errors import ProtocolError, first_line
from ckptd.limits import STACKS_BYTES_MAX
from ckptd.pulse.page import Beat, MappedPage, Phase

Lever = Literal["dump", "end"]
RECENT_STEPS = 32


class Watched:
    """Holds the descriptors that the trainer has handed in. Nothing that it wrote is believed beyond what it says."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.life = ""
        """Empty before there is a page."""
        self.last: Beat | None = None
        self.seen_seconds = 0.0
        """When its last beat was first seen, by the daemon's clock."""
        self.steps = 0
        """Seen in this life."""
        self.recent_steps: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds that the last steps took, without other phases."""
        self.signal = 0
        self.course = Course()
        self._page: MappedPage | None = None
        self._fds: dict[str, int] = {}
        self._in_step_seconds = 0.0

    def take(self, part: str, fd: int, signal: int) -> None:
        """Take over a descriptor. Raises :class:`ProtocolError` for one that is not what it is said to be."""
        try:
            if part == "page":
                self._take_page(fd)
                return
            _check(part, fd)
        except BaseException:
            os.close(fd)
            raise
        if (before := self._fds.pop(part, None)) is not None:
            os.close(before)
        self._fds[part] = fd
        self.signal = signal or self.signal

    def _take_page(self, fd: int) -> None:
        try:
            page = MappedPage(fd, writable=False)
        except Exception as error:
            raise ProtocolError(f"handed in as a status page: {first_line(error)}") from None
        os.close(fd)
        if self._page is not None:
            self._page.close()
        self._page, self.life = page, page.life

    @property
    def generation(self) -> int:
        return self._page.generation if self._page is not None else 0

    def read(self, now_seconds: float) -> list[tuple[Phase, float]]:
        """Look at the page. Returns what was over since the last look: phase, and how long it took. A step's time is
        without that of other phases within, and the first steps are left out."""
        if self._page is None:
            return []
        before, found = self.last, list[tuple[Phase, float]]()
        for beat in self._page.since(before.number if before else 0):
            self.course.add(beat)
            if before is not None and beat.number == before.number + 1:
                found += self._passed(before, beat)
            else:  # the ring has gone round
                self._in_step_seconds = 0.0
            before = beat
        if before is not self.last:
            self.last, self.seen_seconds = before, now_seconds
        return found

    def _passed(self, before: Beat, beat: Beat) -> list[tuple[Phase, float]]:
        seconds = max(beat.monotonic_ns - before.monotonic_ns, 0) / 1e9
        if before.phase is Phase.STEP:
            self._in_step_seconds += seconds
        if not (beat.phase is Phase.STEP and beat.step != before.step):
            return [(before.phase, seconds)] if before.phase not in (Phase.STEP, beat.phase) else []
        self.steps += 1
        took, self._in_step_seconds = self._in_step_seconds, 0.0
        found: list[tuple[Phase, float]] = []
        if before.phase is not Phase.STEP:
            found.append((before.phase, seconds))
        if self.warm:
            self.recent_steps.append(took)
            found.append((Phase.STEP, took))
        return found

    @property
    def warm(self) -> bool:
        """Its first steps are done."""
        return self.steps > WARM_STEPS

    @property
    def count(self) -> int:
        """How many beats there are by now; -1 when this life is over."""
        return -1 if self._page is None else self._page.count()

    def recent(self, count: int) -> list[Beat]:
        """The last beats, oldest first."""
        return [] if self._page is None else self._page.since(self._page.count() - count)

    # Levers

    def pull(self, lever: Lever) -> bool:
        """Raise the lever's signal in the trainer, whatever it is doing. ``False`` where there is no such lever, or
        nobody at its other end any more."""
        fd = self._fds.get(lever)
        if fd is None:
            return False
        try:
            os.write(fd, b"!")
        except BlockingIOError:  # full, so it was pulled often enough
            return True
        except OSError:
            return False
        return True

    @property
    def stacks_bytes(self) -> int:
        """How much of stacks has been written; -1 where there is no place for them."""
        fd = self._fds.get("stacks")
        return os.fstat(fd).st_size if fd is not None else -1

    def stacks(self, start: int) -> str:
        """What was written from ``start`` on, at most :data:`STACKS_BYTES_MAX`."""
        fd = self._fds.get("stacks")
        if fd is None:
            return ""
        return os.pread(fd, STACKS_BYTES_MAX, start).decode(errors="replace")

    def clear_stacks(self) -> None:
        """Give their memory back."""
        if (fd := self._fds.get("stacks")) is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)

    def close(self) -> None:
        """Idempotent."""
        if self._page is not None:
            self._page.close()
            self._page = None
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _check(part: str, fd: int) -> None:
    if part == "stacks":
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise ProtocolError("handed in for stacks: not memory") from None
    elif not stat.S_ISFIFO(os.fstat(fd).st_mode):
        raise ProtocolError(f"handed in as a lever: not a pipe, {part}")
    else:
        os.set_blocking(fd, False)
