"""What a process tree uses: processor time and memory. And how to make the page cache forget a file."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

SAMPLE_SECONDS = 0.02
LOOK_SECONDS = 1.0
"""Over which a machine is watched before it is called quiet."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor seconds up to a moment, or between two."""

    training_thread: float
    own_threads: float
    """Other threads of the trainer's process."""
    other_processes: float
    """Those that the trainer's process has started."""
    machine: float
    """All processes, the kernel included."""

    @classmethod
    def now(cls) -> Cpu:
        """To be called on the training thread."""
        thread = time.thread_time()
        busy = psutil.cpu_times()
        return cls(
            training_thread=thread,
            own_threads=time.process_time() - thread,
            other_processes=sum(_cpu_seconds(process) for process in descendants()),
            machine=sum(busy) - busy.idle - busy.iowait - busy.guest - busy.guest_nice,
        )

    def since(self, before: Cpu) -> Cpu:
        """The difference, never negative: a process that has ended is counted no more."""
        return Cpu(
            self.training_thread - before.training_thread,
            self.own_threads - before.own_threads,
            max(self.other_processes - before.other_processes, 0.0),
            self.machine - before.machine,
        )

    def foreign_cores(self, seconds: float) -> float:
        """How many cores everybody else kept busy."""
        ours = self.training_thread + self.own_threads + self.other_processes
        return max(self.machine - ours, 0.0) / seconds


def await_quiet(foreign_cores: float, seconds: float) -> None:
    """Return as soon as other programs use no more than so many cores, and after so many seconds in any case."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = Cpu.now()
        time.sleep(LOOK_SECONDS)
        if Cpu.now().since(before).foreign_cores(LOOK_SECONDS) <= foreign_cores:
            return


def descendants() -> list[psutil.Process]:
    """Processes that this one has started, and theirs."""
    return list(psutil.Process().children(recursive=True))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this process and its descendants; a page that several map is counted once."""

    private: int
    shared: int
    """memfd, /dev/shm and the like."""

    @classmethod
    def now(cls) -> Memory:
        private = shared = 0
        for pid in [os.getpid(), *(process.pid for process in descendants())]:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
            private += sizes["Pss_Anon"]
            shared += sizes["Pss_Shmem"]
        return cls(private, shared)


class MemoryPeak:
    """The largest use while it is open, by samples. Disturbs what it watches: not for saves that are timed."""

    def __init__(self) -> None:
        self.peak = Memory.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory")

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            now = Memory.now()
            if now.private + now.shared > self.peak.private + self.peak.shared:
                self.peak = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def forget_files(files: Iterable[Path]) -> str:
    """Make the next read come from the disk; returns by which means. The files must have been synced."""
    if os.access(DROP_CACHES, os.W_OK):
        try:
            DROP_CACHES.write_text("1")
            return "drop_caches"
        except OSError:
            pass  # a container without the right
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return "fadvise"


def sync_files(files: Iterable[Path]) -> None:
    """fsync each file and the folders that they lie in."""
    folders: set[Path] = set()
    for path in files:
        _fsync(path)
        folders.add(path.parent)
    for folder in folders:
        _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def machine() -> dict[str, str | int]:
    """What the numbers depend on, without names of hosts, users or folders."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "unknown",
    )
    return {
        "processor": model,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": os.uname().release,
        "open_files_max": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def file_system(folder: Path) -> str:
    """The type of the file system that a folder lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown"
