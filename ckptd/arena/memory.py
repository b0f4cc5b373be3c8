"""An arena as mapped memory.

Layout, in bytes from the start: the header page; one page of records per slot; the slots, each a whole number of
pages. A slot holds the shard exactly as it will lie in storage, and on the next page boundary behind it the encoded
snapshot record.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import uuid
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from ckptd.arena.slots import RECORD_BYTES, SlotRecord, read_record, write_record
from ckptd.errors import FormatError, IntegrityError, ResourceError
from ckptd.format.digests import digest
from ckptd.limits import MIB, PAGE_BYTES, SLOTS_MAX

_MAGIC = b"CKPTDAR3"
_HEADER = struct.Struct("<8s16sIIQ")  # magic, arena id, slots, reserved, slot bytes
_CHECK = struct.Struct("<Q")

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 16 * MIB
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
        return PAGE_BYTES * (1 + self.slots)

    @property
    def size_bytes(self) -> int:
        return self.first_slot + self.slots * self.slot_bytes


def _identify(fd: int) -> tuple[str, ArenaShape]:
    """The id and shape of the arena behind a descriptor that anybody may have sent. Raises :class:`FormatError`."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEADER.size + _CHECK.size, 0)
    except OSError as error:
        raise FormatError(f"not an arena: {error.strerror}") from None
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise FormatError("not an arena: its size is not sealed")
    if len(head) < _HEADER.size + _CHECK.size:
        raise FormatError(f"not an arena: {size} bytes")
    magic, raw_id, slots, _, slot_bytes = _HEADER.unpack_from(head)
    if magic != _MAGIC or _CHECK.unpack_from(head, _HEADER.size)[0] != xxh3_64_intdigest(head[: _HEADER.size]):
        raise FormatError("not an arena, or one of another version")
    try:
        shape = ArenaShape(slots, slot_bytes)
    except ResourceError as error:
        raise FormatError(f"not an arena: {error}") from None
    if shape.size_bytes != size:
        raise FormatError(f"an arena of {size} bytes claims to have {shape.size_bytes}")
    return raw_id.hex(), shape


class Arena:
    """A mapped arena. Owns the descriptor and the mapping; :meth:`close` gives both back.

    Views handed out (``slot``, ``shard`` …) keep the mapping alive beyond that.
    """

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        """Map an arena that exists, and own ``fd`` from then on.

        Raises :class:`FormatError` where it is none, or its size is not sealed, so that whoever sent it could take
        the memory away from under us; :class:`ResourceError` where it cannot be mapped. Then ``fd`` is still the
        caller's.
        """
        self.id, self.shape = _identify(fd)
        # Not writable: what is written all the same stays here. torch takes no memory that is marked as read-only.
        sharing = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        try:
            self._mmap = mmap.mmap(fd, self.shape.size_bytes, sharing, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            raise ResourceError(f"cannot map an arena of {self.shape.size_bytes} bytes: {error}") from None
        self.fd = fd
        self._writable = writable
        self.view = memoryview(self._mmap)

    @classmethod
    def create(cls, shape: ArenaShape) -> Arena:
        """A new arena of zeros, its size sealed, its pages not yet allocated; see :meth:`allocate`.

        Raises :class:`ResourceError` where there is not enough address space, or no descriptor left.
        """
        try:
            fd = os.memfd_create("ckptd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ResourceError(f"cannot make an arena: {error.strerror}") from None
        try:
            os.ftruncate(fd, shape.size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            header = _HEADER.pack(_MAGIC, uuid.uuid4().bytes, shape.slots, 0, shape.slot_bytes)
            os.pwrite(fd, header + _CHECK.pack(xxh3_64_intdigest(header)), 0)
            return cls(fd)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError | OverflowError):
                raise ResourceError(f"cannot make an arena of {shape.size_bytes} bytes: {error}") from None
            raise

    def allocate(self) -> None:
        """Give every page its memory now, and map it, so that no save pays for it. Blocking, about 0.3 s per GiB,
        without the GIL.

        Raises :class:`ResourceError` where there is not enough.
        """
        try:
            os.posix_fallocate(self.fd, 0, self.shape.size_bytes)
        except OSError as error:
            raise ResourceError(f"no memory for an arena of {self.shape.size_bytes} bytes: {error.strerror}") from None
        self.populate()

    def populate(self) -> None:
        """Fill this process's page table, so that the first copy does not fault. Blocking, without the GIL; a kernel
        that cannot is left to fault, and so is a mapping that is read-only."""
        self._populate(0, self.shape.size_bytes)

    def populate_slot(self, number: int, start: int, stop: int) -> None:
        """The same for the bytes ``[start, stop)`` of a slot."""
        first = self.shape.first_slot + number * self.shape.slot_bytes
        self._populate(first + start - start % PAGE_BYTES, first + stop)

    def _populate(self, begin: int, stop: int) -> None:
        if self._writable:
            # Not mmap.madvise, which holds the GIL. Piece by piece, as whoever starts a thread or gets memory waits
            # meanwhile. By reading, which maps many pages at a fault: pages that have memory, so for writing too.
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
            for start in range(begin, stop, _POPULATE_BYTES):
                size = min(_POPULATE_BYTES, stop - start)
                _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _MADV_POPULATE_READ)

    def hide_from_children(self) -> None:
        """Forked children do not inherit the mapping."""
        self._mmap.madvise(mmap.MADV_DONTFORK)

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def slot(self, number: int) -> memoryview:
        """All bytes of a slot."""
        self._check_number(number)
        start = self.shape.first_slot + number * self.shape.slot_bytes
        return self.view[start : start + self.shape.slot_bytes]

    def record(self, number: int) -> SlotRecord:
        return read_record(self._record_page(number))[1]

    def records(self) -> list[SlotRecord]:
        return [self.record(number) for number in range(self.shape.slots)]

    def set_record(self, number: int, record: SlotRecord) -> None:
        write_record(self._record_page(number), record)

    def shard(self, number: int, record: SlotRecord) -> memoryview:
        """The shard in a slot, read-only. Raises :class:`IntegrityError` where the record claims more than there is."""
        return self._bytes(number, record.shard_bytes)

    def held(self, number: int, record: SlotRecord) -> memoryview:
        """All bytes of the snapshot in a slot, resident pieces included; else as :meth:`shard`."""
        return self._bytes(number, max(record.held_bytes, record.shard_bytes))

    def _bytes(self, number: int, size_bytes: int) -> memoryview:
        if size_bytes > self.shape.slot_bytes:
            raise IntegrityError(f"slot {number} claims to hold more than its {self.shape.slot_bytes} bytes")
        return self.slot(number)[:size_bytes].toreadonly()

    def doc(self, number: int, record: SlotRecord) -> bytes:
        """The encoded snapshot record of a slot, a copy. Raises :class:`IntegrityError` where it is torn."""
        start = pages(max(record.held_bytes, record.shard_bytes))
        if start + record.doc_bytes > self.shape.slot_bytes:
            raise IntegrityError(f"slot {number} claims to hold more than its {self.shape.slot_bytes} bytes")
        data = bytes(self.slot(number)[start : start + record.doc_bytes])
        if digest(data) != record.doc_digest:
            raise IntegrityError(f"the snapshot record in slot {number} is torn")
        return data

    def _record_page(self, number: int) -> memoryview:
        self._check_number(number)
        start = PAGE_BYTES * (1 + number)
        return self.view[start : start + 2 * RECORD_BYTES]

    def _check_number(self, number: int) -> None:
        if not 0 <= number < self.shape.slots:
            raise IndexError(f"slot {number} of {self.shape.slots}")

    def close(self) -> None:
        """Give the descriptor back, and the mapping as soon as no view of it is left. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # somebody holds a view, and the last one takes the mapping with it
                self.view.release()
                self._mmap.close()
