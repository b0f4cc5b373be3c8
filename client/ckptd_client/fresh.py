"""New memory for what is read from storage."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time

from ckptd.limits import MIB

CHUNK_BYTES = 16 * MIB
CHUNK_SECONDS_MAX = 0.016
"""Processor time: 1 GB/s, as fast as small pages come. Huge ones come at 7 GB/s, where there are any."""
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def fresh_memory(size_bytes: int) -> memoryview:
    """Zeros. Private, as first touches of shared memory cost half as much again.

    From its beginning on a thread gives it huge pages, ahead of who writes to it: a first touch costs a fifth, and a
    copy from there half. It stops where they come slowly: the kernel has to move other pages out of their way where
    memory is in pieces, and a virtual machine that gives free memory back has to ask its host for each. Small pages
    come from what is in use anyway.
    """
    made = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= CHUNK_BYTES:
        with contextlib.suppress(RuntimeError):  # no thread is to be had: it works without
            threading.Thread(target=_give_huge_pages, args=(made,), name="ckptd-fresh", daemon=True).start()
    return memoryview(made)[:size_bytes]


def _give_huge_pages(memory: mmap.mmap) -> None:
    first = ctypes.c_char.from_buffer(memory)
    try:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for start in range(0, len(memory) - CHUNK_BYTES + 1, CHUNK_BYTES):
            memory.madvise(mmap.MADV_HUGEPAGE, start, CHUNK_BYTES)
            began = time.thread_time()
            place = ctypes.c_void_p(ctypes.addressof(first) + start)
            # Not mmap.madvise, which holds the GIL.
            failed = _libc.madvise(place, ctypes.c_size_t(CHUNK_BYTES), _MADV_POPULATE_WRITE)
            if failed or time.thread_time() - began > CHUNK_SECONDS_MAX:
                return
    except OSError:
        return  # a kernel without them
