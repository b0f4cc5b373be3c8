"""The seam between the local backend and the operating system: every file operation it may use, and no other.

A model of a disk that loses power stands in for :class:`Files` in tests, so the rules are narrow: bytes are durable
after ``fsync`` of their file, names after ``fsync_directory`` of the folder they stand in.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import aiofiles

from ckptd.limits import PAGE_BYTES

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_libc = ctypes.CDLL(None, use_errno=True)


class FileState(NamedTuple):
    """What the file system says of one name."""

    name: str
    size_bytes: int
    modified_seconds: float
    identity: tuple[int, int]
    """Device and inode."""
    is_file: bool
    is_directory: bool
    links: int
    """How many names the file has; 0 once it was removed."""


class Room(NamedTuple):
    """What a file system can still take."""

    free_bytes: int
    free_files: int | None
    """``None``: as many as there are bytes for."""


def boot_id() -> str | None:
    """Which boot of this machine this is, in hexadecimal, whatever container we are in; ``None`` where it is hidden."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip().replace("-", "")
    except OSError:
        return None


class Files:
    """Blocking, but for ``read_small``; raises :class:`OSError`. Paths are absolute; symbolic links are never followed
    in the last segment."""

    def create(self, path: str) -> int:
        """A descriptor for writing to a file that did not exist; its mode follows the umask."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open(self, path: str) -> int:
        """A descriptor for reading a file. ``EISDIR`` for a folder, ``ENXIO`` for a pipe, a socket or a device, which
        could keep a reader waiting for ever."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
                raise OSError(number, os.strerror(number), path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_to_lock(self, path: str) -> int:
        """A descriptor for :meth:`lock`; for writing, as some file systems lock no others exclusively."""
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    def lock(self, descriptor: int) -> bool:
        """Lock an open file until it is closed, by whatever ends the process too. ``False`` where another open file
        description holds the lock, in this process or in another on this machine."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def set_direct(self, descriptor: int, direct: bool) -> None:
        """Turn ``O_DIRECT`` on or off. ``EINVAL`` where the file system has none."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        if wanted != flags:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)

    def allocate(self, descriptor: int, size: int) -> None:
        """Reserve room for the bytes ``[0, size)``, so that a full disk shows now."""
        os.posix_fallocate(descriptor, 0, size)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write some of ``data``; returns how many bytes."""
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        """Read into some of ``out``; returns how many bytes, 0 at the end of the file."""
        return os.preadv(descriptor, [out], offset)

    def read_parts(self, descriptor: int, outs: Sequence[memoryview], offset: int) -> int:
        """The same into several memories, one after the other."""
        return os.preadv(descriptor, outs, offset)

    async def read_small(self, path: str, limit_bytes: int, executor: Executor) -> bytes:
        """The first ``limit_bytes`` of a file, all of it where it is smaller, without blocking the event loop: in
        threads of ``executor``."""
        reading = asyncio.ensure_future(self._read_small(path, limit_bytes, executor))
        try:
            return await asyncio.shield(reading)
        finally:
            if not reading.done():  # cancelled: a file that is being opened by a thread would stay open
                await asyncio.wait([reading])
                reading.exception()

    async def _read_small(self, path: str, limit_bytes: int, executor: Executor) -> bytes:
        opened = aiofiles.open(path, "rb", opener=lambda path, _: self.open(path), executor=executor)
        async with opened as file:
            return await file.read(limit_bytes)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def link(self, descriptor: int, target: str) -> None:
        """Give the open file the name ``target`` too. The file, not what stands at its name by now.

        ``EEXIST`` where the name is taken; any other error where links are not to be had.
        """
        # Python follows the link in /proc only where it is told a folder to start from, though the path is absolute.
        os.link(f"/proc/self/fd/{descriptor}", target, src_dir_fd=descriptor, follow_symlinks=True)

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename unless ``target`` exists (``EEXIST``). ``EINVAL`` or ``ENOSYS`` where that is not to be had."""
        done = _libc.renameat2(
            _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE)
        )
        if done != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), source, None, target)

    def rename(self, source: str, target: str) -> None:
        """Rename over whatever ``target`` is."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def remove_directory(self, path: str) -> None:
        """``ENOTEMPTY`` unless it is empty."""
        os.rmdir(path)

    def fsync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def state(self, path: str) -> FileState:
        """Of the name ``path``."""
        return _state(os.path.basename(path), os.stat(path, follow_symlinks=False))

    def state_of(self, descriptor: int) -> FileState:
        """Of an open file, whose name may have gone."""
        return _state("", os.fstat(descriptor))

    def names(self, path: str) -> list[tuple[str, bool]]:
        """What stands in a folder and whether it is a folder itself, in no order, without a look at each."""
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def list(self, path: str) -> list[FileState]:
        """What stands in a folder, in no order, without what vanished meanwhile."""
        found: list[FileState] = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    found.append(_state(entry.name, entry.stat(follow_symlinks=False)))
                except FileNotFoundError:
                    continue
        return found

    def resolved(self, path: str) -> str:
        """The path without symbolic links, as far as it exists."""
        return os.path.realpath(path)

    def room(self, path: str) -> Room:
        """On the file system of ``path``, for an ordinary user."""
        found = os.statvfs(path)
        return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def _state(name: str, found: os.stat_result) -> FileState:
    return FileState(
        name,
        found.st_size,
        found.st_mtime,
        (found.st_dev, found.st_ino),
        stat.S_ISREG(found.st_mode),
        stat.S_ISDIR(found.st_mode),
        found.st_nlink,
    )


class _Buffer(ctypes.Structure):
    """``Py_buffer`` as far as the address; the rest is only room."""

    _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie; ``ctypes`` alone tells it only of writable ones."""
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    try:
        return buffer.address or 0
    finally:
        _release_buffer(ctypes.byref(buffer))


def new_pages(count: int) -> memoryview:
    """Memory that begins on a page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, count * PAGE_BYTES))


def unsupported(error: OSError) -> bool:
    """Whether the error means that this file, memory or range does not take the operation at all, such as ``O_DIRECT``
    or reserving room."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
