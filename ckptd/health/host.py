"""The machine as the kernel sees it: memory pressure, load, OOM kills, full disks, and its clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptd.limits import GIB
from ckptd.storage import Finding

PRESSURE_WARNING_PERCENT = 10.0
PRESSURE_ERROR_PERCENT = 40.0
"""Of the last ten seconds, in which all tasks waited for memory."""
LOAD_PER_CPU_MAX = 4.0
DISK_FREE_BYTES_MIN = GIB
DISK_FREE_FRACTION_MIN = 0.02
"""A disk with less than both is as good as full."""
CLOCK_JUMP_SECONDS = 1.0
"""Slewing, as NTP does it, stays far below this between two looks."""


class Host:
    """One machine, looked at again and again. Belongs to one thread; a dead network disk can block it."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        cgroup: Path | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``cgroup``: this process's, else found by ``proc``."""
        self._proc = proc
        self._cgroup = cgroup or _own_cgroup(proc)
        self._wall, self._monotonic = wall, monotonic
        self._offset_seconds = wall() - monotonic()
        self._kills = self._oom_kills()
        self.folders: frozenset[Path] = frozenset()
        """Whose disks are looked at. May be replaced by another thread."""
        self.figures: dict[str, float | None] = {}
        """memory_pressure_percent, load_per_cpu, oom_kills; ``None``: this kernel does not tell."""

    def look(self) -> Iterator[Finding]:
        """What is wrong now, or went wrong since the last look."""
        yield from self._memory_pressure()
        yield from self._load()
        yield from self._killed()
        yield from self._clock()
        for folder in sorted(self.folders):
            yield from _disk(folder)

    def _memory_pressure(self) -> Iterator[Finding]:
        """Of this process's cgroup where it has one, else of the machine; the worse of both."""
        waits = [
            wait
            for path in (self._proc / "pressure" / "memory", self._cgroup / "memory.pressure")
            if (wait := _waiting_percent(path)) is not None
        ]
        self.figures["memory_pressure_percent"] = percent = max(waits, default=None)
        if percent is not None and percent >= PRESSURE_WARNING_PERCENT:
            yield Finding(
                "error" if percent >= PRESSURE_ERROR_PERCENT else "warning",
                "memory pressure",
                f"everything waited for memory in {percent:.0f} % of the last 10 s",
                "something takes too much memory here: the OOM killer comes next",
            )

    def _load(self) -> Iterator[Finding]:
        try:
            load = float((self._proc / "loadavg").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return
        self.figures["load_per_cpu"] = per_cpu = load / (os.cpu_count() or 1)
        if per_cpu > LOAD_PER_CPU_MAX:
            text = f"{load:.0f} tasks run or wait for disks, mean of 5 minutes: {per_cpu:.1f} for each processor"
            yield Finding("warning", "load", text, "what else runs here?")

    def _oom_kills(self) -> dict[str, int | None]:
        return {
            "this machine": _field(self._proc / "vmstat", "oom_kill"),
            "this cgroup": _field(self._cgroup / "memory.events", "oom_kill"),
        }

    def _killed(self) -> Iterator[Finding]:
        now = self._oom_kills()
        self.figures["oom_kills"] = now["this machine"]
        for where, count in now.items():
            before = self._kills[where]
            if count is not None and before is not None and count > before:
                text = f"the kernel ended {count - before} processes of {where} for want of memory"
                yield Finding("error", f"OOM kill in {where}", text, "dmesg says which")
        self._kills = now

    def _clock(self) -> Iterator[Finding]:
        offset = self._wall() - self._monotonic()
        jump, self._offset_seconds = offset - self._offset_seconds, offset
        if abs(jump) > CLOCK_JUMP_SECONDS:
            text = f"the clock was set by {jump:+.1f} s, or the machine was suspended"
            yield Finding("warning", "clock jump", text, "let NTP slew it")


def _disk(folder: Path) -> Iterator[Finding]:
    subject = f"disk of {folder}"
    try:
        room = os.statvfs(folder)
    except FileNotFoundError:
        return  # a run that has not saved yet
    except OSError as error:
        yield Finding("error", subject, f"it does not answer: {error.strerror}", "look at the disk or its server")
        return
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    if total and free < DISK_FREE_BYTES_MIN and free < DISK_FREE_FRACTION_MIN * total:
        text = f"{free} of {total} bytes are free"
        yield Finding("error", subject, text, "keep fewer checkpoints, or make room")
    elif room.f_files and not room.f_favail:
        yield Finding("error", subject, "no file can be made: all inodes are taken", "remove small files")


def _own_cgroup(proc: Path) -> Path:
    """Of version 2; else a folder that is not there."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    inside = next((line[3:] for line in lines if line.startswith("0::")), "/none")
    return Path("/sys/fs/cgroup") / inside.strip("/")


def _waiting_percent(path: Path) -> float | None:
    """``avg10`` of the line ``full`` of a pressure file."""
    try:
        lines = path.read_text().splitlines()
        full = next(line for line in lines if line.startswith("full "))
        return float(full.split()[1].removeprefix("avg10="))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} "))
    except (OSError, StopIteration, ValueError):
        return None
