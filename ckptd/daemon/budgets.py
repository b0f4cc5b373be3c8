"""What a daemon may take of its machine, so that the rest is the trainers'."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psutil

from ckptd.daemon.processors import processor_count
from ckptd.errors import ResourceError
from ckptd.limits import (
    DIGEST_THREADS_MAX,
    IO_THREADS_PER_PROCESSOR,
    OTHER_THREADS_MAX,
    OTHER_THREADS_MIN,
    REQUESTS_INFLIGHT,
    VERIFY_BYTES_PER_SECOND,
)

NICE_MAX = 19
"""The kernel knows no more."""
LOWEST = 7
"""Of the eight levels of a class of I/O."""


class IoPriority(StrEnum):
    """Whose reads and writes a disk does first."""

    NORMAL = "normal"
    LOW = "low"
    """The last of the best-effort class."""
    IDLE = "idle"
    """When nobody else wants the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Fixed for the life of a daemon; ``ckptd status`` shows them all."""

    memory_bytes: int | None = None
    """All arenas together. ``None``: as much as the machine and the cgroup have left, see
    :func:`ckptd.daemon.memory.headroom_bytes`."""
    write_bytes_per_second: int | None = None
    """All that is written, to whatever stores; ``None``: as fast as they take it."""
    copy_bytes_per_second: int | None = None
    """All copies to further tiers, apart from the others; ``None``: they share in ``write_bytes_per_second``."""
    verify_bytes_per_second: int | None = VERIFY_BYTES_PER_SECOND
    """At which commits are read again, all of them; ``None``: they are not."""
    requests_inflight: int = REQUESTS_INFLIGHT
    """Operations on one store at the same time, at most."""
    digest_threads: int | None = None
    """That compute digests; ``None``: :attr:`digest_threads_used`."""
    io_threads: int | None = None
    """That write to or read from one store, at most; its options may say fewer. ``None``: :attr:`io_threads_used`."""
    nice: int = 0
    """Added to the daemon's own niceness, at most up to 19."""
    io_priority: IoPriority = IoPriority.NORMAL

    @property
    def digest_threads_used(self) -> int:
        """One for each processor that this process may use, at most :data:`DIGEST_THREADS_MAX`, where none is set."""
        return self.digest_threads or min(_processors(), DIGEST_THREADS_MAX)

    @property
    def io_threads_used(self) -> int:
        """:data:`IO_THREADS_PER_PROCESSOR` for each, where none is set: they mostly wait."""
        return self.io_threads or _processors() * IO_THREADS_PER_PROCESSOR

    @property
    def other_threads_used(self) -> int:
        """For all else that blocks: decoding, comparing, verifying, small files."""
        return min(OTHER_THREADS_MIN + _processors(), OTHER_THREADS_MAX)

    def lower_priority(self) -> None:
        """Take as little precedence as is set: this thread, and all threads and processes that it starts from now on.
        Linux keeps both for each thread, so it is to be called before there are others. Raises
        :class:`ResourceError` where the system forbids it."""
        try:
            if self.nice:
                os.nice(self.nice)
            if self.io_priority is IoPriority.LOW:
                psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, LOWEST)
            elif self.io_priority is IoPriority.IDLE:
                psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
        except (OSError, psutil.Error) as error:
            raise ResourceError(
                f"nice {self.nice} and I/O priority {self.io_priority} cannot be set: {error}",
                hint="leave out --nice and --io-priority, or let the container make these system calls",
            ) from error

    def shown(self) -> dict[str, Any]:
        """For ``ckptd status``: what holds, with the kernel's word on this process."""
        return {
            "processors": round(processor_count(), 2),
            "digest_threads": self.digest_threads_used,
            "io_threads": self.io_threads_used,
            "other_threads": self.other_threads_used,
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "io_priority": str(self.io_priority),
            "requests_inflight": self.requests_inflight,
            "memory_bytes": self.memory_bytes,
            "write_bytes_per_second": self.write_bytes_per_second,
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "verify_bytes_per_second": self.verify_bytes_per_second,
        }


def _processors() -> int:
    """Whole ones, at least one."""
    return max(math.floor(processor_count()), 1)
