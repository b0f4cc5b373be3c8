"""Bare direct reads and writes of one file: what the disk gives without any library between."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

PART_BYTES = 8 * 2**20


def write_direct(path: Path, memory: memoryview) -> None:
    """Write and sync a new file. ``memory`` begins on a page and is whole pages long. A file system without direct
    access (tmpfs) is written to as it can be."""
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, len(memory))
        for start in range(0, len(memory), PART_BYTES):
            os.pwrite(descriptor, memory[start : start + PART_BYTES], start)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_direct(path: Path, memory: memoryview) -> None:
    """Read a whole file into memory, as :func:`write_direct`."""
    descriptor = _open(path, os.O_RDONLY)
    try:
        for start in range(0, len(memory), PART_BYTES):
            os.preadv(descriptor, [memory[start : start + PART_BYTES]], start)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    return descriptor
