"""The table from ``errno`` to the errors of ckptd."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Generator

from ckptd.errors import AccessDenied, NotFound, StorageError, StorageFull, TooLarge, Unavailable, UsageError

_NOT_FOUND = {errno.ENOENT, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENXIO}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_HINTS_FULL = {
    "disk": "free some space there, or keep fewer checkpoints; the next save tries again",
    "quota": "have the quota raised, or keep fewer checkpoints; the next save tries again",
}
_HINT_PERMISSION = "give the user that ckptd runs as the right to read and write there"
_HINTS_DENIED = {
    errno.ELOOP: "a symbolic link is there, and is not followed: bring the file itself back",
    errno.ENXIO: "a pipe, a socket or a device is there, and is not read: bring the file back",
    errno.EROFS: "mount the file system for writing; after a disk error, repair it first",
}
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@contextlib.contextmanager
def mapped(key: str, path: str, *, room: Callable[[], str] | None = None) -> Generator[None]:
    """Turn an :class:`OSError` about ``path`` into the error of ckptd that says the same of ``key``.

    ``room``: what a full disk is to say of what is needed and what is free; asked when it is full.
    """
    try:
        yield
    except OSError as error:
        raise _error(error, key, path, _said(room) if error.errno in _FULL else "") from error


def _said(room: Callable[[], str] | None) -> str:
    try:
        return "" if room is None else room()
    except OSError:
        return ""


def _error(error: OSError, key: str, path: str, room: str) -> Exception:
    text = f"{error.strerror or error} at {path}"
    if error.errno in _FULL:
        limit = "quota" if error.errno == errno.EDQUOT else "disk"
        room += " on the disk as a whole" if room and limit == "quota" else ""
        return StorageFull(f"{limit} full at {path}{room and ': '}{room}", key=key, hint=_HINTS_FULL[limit])
    if error.errno in _NOT_FOUND:
        return NotFound(f"no such file: {path}", key=key)
    if error.errno in _DENIED:
        return AccessDenied(text, key=key, hint=_HINTS_DENIED.get(error.errno or 0, _HINT_PERMISSION))
    if error.errno == errno.EISDIR:
        return UsageError(f"{key}: one of two keys may not be the other's prefix, and {path} is a folder")
    if error.errno == errno.EFBIG:
        return TooLarge(text, key=key, hint="the file system or a limit of the process (ulimit -f) forbids such a file")
    if error.errno in _TRANSIENT:
        return Unavailable(text, key=key)
    return StorageError(text, key=key)
