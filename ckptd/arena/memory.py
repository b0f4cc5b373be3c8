"""An arena as mapped memory.

Layout, in bytes from the start: the header page; one page of records per slot; the status page (64 KiB); the slots,
each a whole number of pages. A slot holds the shard exactly as it will lie in storage, and on the next page boundary
behind it the encoded snapshot record.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import uuid
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from ckptd.arena.slots import RECORD_BYTES, SlotRecord, read_record, write_record
from ckptd.arena.status import STATUS_BYTES, StatusPage
from ckptd.errors import FormatError, IntegrityError, ResourceError
from ckptd.format.digests import digest
from ckptd.limits import PAGE_BYTES, SLOTS_MAX

_MAGIC = b"CKPTDAR1"
_HEADER = struct.Struct("<8s16sIIQ")  # magic, arena id, slots, reserved, slot bytes
_CHECK = struct.Struct("<Q")

_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def pages(size_bytes: int) -> int:
    """Rounded up to whole pages, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """How many slots of what size. ``slot_bytes`` is a multiple of the page size."""

    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= SLOTS_MAX:
            raise ResourceError(f"an arena has 1 to {SLOTS_MAX} slots, not {self.slots}")
        if self.slot_bytes < PAGE_BYTES or self.slot_bytes % PAGE_BYTES:
            raise ResourceError(f"slots of {self.slot_bytes} bytes are not whole pages")

    @property
    def first_slot(self) -> int:
        return PAGE_BYTES * (1 + self.slots) + STATUS_BYTES

    @property
    def size_bytes(self) -> int:
        return self.first_slot + self.slots * self.slot_bytes


class Arena:
    """A mapped arena. Owns the descriptor and the mapping; :meth:`close` gives both back.

    Views handed out (``slot``, ``shard`` …) keep the mapping alive: release them before ``close``, which otherwise
    raises :class:`BufferError`.
    """

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        """Map an arena that exists. Takes over ``fd``. Raises :class:`FormatError` where it is none."""
        self.fd = fd
        size = os.fstat(fd).st_size
        if size < PAGE_BYTES:
            raise FormatError(f"not an arena: {size} bytes")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mmap = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        self.view = memoryview(self._mmap)
        magic, raw_id, slots, _, slot_bytes = _HEADER.unpack_from(self.view)
        check = _CHECK.unpack_from(self.view, _HEADER.size)[0]
        if magic != _MAGIC or check != xxh3_64_intdigest(bytes(self.view[: _HEADER.size])):
            raise FormatError("not an arena, or one of another version")
        self.id = raw_id.hex()
        self.shape = ArenaShape(slots, slot_bytes)
        if self.shape.size_bytes != size:
            raise FormatError(f"an arena of {size} bytes claims to have {self.shape.size_bytes}")
        status = PAGE_BYTES * (1 + slots)
        self.status = StatusPage(self.view[status : status + STATUS_BYTES])

    @classmethod
    def create(cls, shape: ArenaShape) -> Arena:
        """A new arena of zeros, its size sealed, its pages not yet allocated; see :meth:`allocate`."""
        fd = os.memfd_create("ckptd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, shape.size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            header = _HEADER.pack(_MAGIC, uuid.uuid4().bytes, shape.slots, 0, shape.slot_bytes)
            os.pwrite(fd, header + _CHECK.pack(xxh3_64_intdigest(header)), 0)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def allocate(self) -> None:
        """Give every page its memory now, so that no save pays for it. Blocking, about 0.2 s per GiB, without the GIL.

        Raises :class:`ResourceError` where there is not enough.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.shape.size_bytes)
        except OSError as error:
            raise ResourceError(f"no memory for an arena of {self.shape.size_bytes} bytes: {error.strerror}") from None

    def populate(self) -> None:
        """Fill this process's page table, so that the first copy does not fault. Blocking, without the GIL; a kernel
        that cannot is left to fault."""
        self._advise(_MADV_POPULATE_WRITE)

    def hide_from_children(self) -> None:
        """Forked children do not inherit the mapping."""
        self._advise(_MADV_DONTFORK)

    def _advise(self, advice: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(self.shape.size_bytes), advice)

    def slot(self, number: int) -> memoryview:
        """All bytes of a slot."""
        start = self.shape.first_slot + number * self.shape.slot_bytes
        return self.view[start : start + self.shape.slot_bytes]

    def record(self, number: int) -> SlotRecord:
        return read_record(self._record_page(number))[1]

    def records(self) -> list[SlotRecord]:
        return [self.record(number) for number in range(self.shape.slots)]

    def set_record(self, number: int, record: SlotRecord) -> None:
        write_record(self._record_page(number), record)

    def shard(self, number: int, record: SlotRecord) -> memoryview:
        """The shard in a slot, read-only."""
        return self.slot(number)[: record.shard_bytes].toreadonly()

    def doc(self, number: int, record: SlotRecord) -> bytes:
        """The encoded snapshot record of a slot, a copy. Raises :class:`IntegrityError` where it is torn."""
        start = pages(record.shard_bytes)
        if start + record.doc_bytes > self.shape.slot_bytes:
            raise IntegrityError(f"slot {number} claims to hold more than its {self.shape.slot_bytes} bytes")
        data = bytes(self.slot(number)[start : start + record.doc_bytes])
        if digest(data) != record.doc_digest:
            raise IntegrityError(f"the snapshot record in slot {number} is torn")
        return data

    def _record_page(self, number: int) -> memoryview:
        if not 0 <= number < self.shape.slots:
            raise IndexError(f"slot {number} of {self.shape.slots}")
        start = PAGE_BYTES * (1 + number)
        return self.view[start : start + 2 * RECORD_BYTES]

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self.status.release()
            self.view.release()
            self._mmap.close()
            os.close(self.fd)
            self.fd = -1
