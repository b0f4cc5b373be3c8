"""Memory that one process makes and another one maps, of a size that neither can change."""

from __future__ import annotations

import fcntl
import mmap
import os

from ckptd.errors import FormatError, ResourceError

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_sealed(name: str, size_bytes: int) -> int:
    """A descriptor of new memory, all zeros. Raises :class:`ResourceError`."""
    try:
        fd = os.memfd_create(f"ckptd-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ResourceError(f"cannot make {name} memory: {error.strerror}") from None
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    return fd


def map_sealed(fd: int, size_bytes: int, what: str, *, writable: bool) -> mmap.mmap:
    """Map what lies behind ``fd``, which stays the caller's. Raises :class:`FormatError` for what has another size or
    could be truncated under us; :class:`ResourceError` where it cannot be mapped."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
        size = os.fstat(fd).st_size
    except OSError as error:
        raise FormatError(f"not {what}: {error.strerror}") from None
    if not sealed or size != size_bytes:
        raise FormatError(f"not {what}: {size} bytes, {'sealed' if sealed else 'not sealed'}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
    except OSError as error:
        raise ResourceError(f"cannot map {what}: {error.strerror}") from None
