"""The arena: memory without a name, of a size that nobody can change, that tells what lies in it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.arena import Arena, ArenaShape, SlotRecord, SlotState
from ckptd.arena.memory import pages
from ckptd.errors import FormatError, IntegrityError, ResourceError
from ckptd.format.digests import digest
from ckptd.limits import MIB, PAGE_BYTES, SLOTS_MAX

SHAPE = ArenaShape(2, 4 * PAGE_BYTES)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(SHAPE)
    yield made
    made.close()


def fill(arena: Arena, number: int, shard: bytes, doc: bytes, ticket: int = 1) -> SlotRecord:
    """What a trainer does: bytes first, then the record that speaks of them."""
    slot = arena.slot(number)
    slot[: len(shard)] = shard
    start = pages(len(shard))
    slot[start : start + len(doc)] = doc
    slot.release()
    record = SlotRecord(SlotState.SEALED, 7, 3, ticket, len(shard), len(doc), digest(doc), os.getpid())
    arena.set_record(number, record)
    return record


def test_a_new_arena_is_empty_and_of_the_size_that_it_says(arena: Arena) -> None:
    assert arena.shape == SHAPE
    assert os.fstat(arena.fd).st_size == SHAPE.size_bytes == 11 * PAGE_BYTES
    assert arena.records() == [SlotRecord(), SlotRecord()]
    assert len(arena.id) == 32
    assert not any(arena.slot(1))
    assert not os.get_inheritable(arena.fd)


def test_slots_are_page_aligned_and_apart(arena: Arena) -> None:
    first, second = arena.slot(0), arena.slot(1)
    first[:] = b"\1" * len(first)
    second[:] = b"\2" * len(second)
    assert set(first) == {1}
    assert set(second) == {2}
    assert arena.records() == [SlotRecord(), SlotRecord()]
    assert SHAPE.first_slot % PAGE_BYTES == 0
    for number in (-1, 2):
        with pytest.raises(IndexError):
            arena.slot(number)
        with pytest.raises(IndexError):
            arena.record(number)
    first.release()
    second.release()


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(0, 4096), (SLOTS_MAX + 1, 4096), (1, 0), (1, 4097), (1, 100), (1, -4096)]
)
def test_impossible_shapes_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ResourceError):
        ArenaShape(slots, slot_bytes)


def test_what_lies_in_a_slot_is_read_by_another_mapping(arena: Arena) -> None:
    record = fill(arena, 1, b"shard" * 1000, b'{"step":7}')
    other = Arena(os.dup(arena.fd), writable=False)
    try:
        assert (other.id, other.shape) == (arena.id, arena.shape)
        assert other.records() == [SlotRecord(), record]
        shard = other.shard(1, record)
        assert bytes(shard) == b"shard" * 1000
        assert shard.readonly
        shard.release()
        assert other.doc(1, record) == b'{"step":7}'
        other.hide_from_children()  # these suit a read-only mapping too
        other.populate()
        other.set_record(0, record)  # stays with the mapping that must not write
        other.slot(1)[:5] = b"other"
        assert arena.records() == [SlotRecord(), record]
        assert bytes(arena.slot(1)[:5]) == b"shard"
    finally:
        other.close()


ADOPTER = """
import sys
from ckptd.arena import Arena, SlotState
arena = Arena(int(sys.argv[1]))
(number,) = [n for n, record in enumerate(arena.records()) if record.state is SlotState.SEALED]
record = arena.record(number)
print(arena.id, record.step, arena.doc(number, record).decode(), bytes(arena.shard(number, record)).decode())
arena.close()
"""


def test_r144_another_process_adopts_an_arena_after_its_maker_let_go() -> None:
    arena = Arena.create(SHAPE)
    fill(arena, 0, b"shard", b"document")
    fd, name = os.dup(arena.fd), arena.id
    arena.close()
    done = subprocess.run(
        [sys.executable, "-c", ADOPTER, str(fd)], pass_fds=[fd], capture_output=True, text=True, timeout=60, check=False
    )
    os.close(fd)
    assert done.stdout.split() == [name, "7", "document", "shard"], done.stderr


def test_r143_r172_memory_has_no_name_anywhere(arena: Arena) -> None:
    target = os.readlink(f"/proc/self/fd/{arena.fd}")
    assert target == "/memfd:ckptd-arena (deleted)"
    inode = os.fstat(arena.fd).st_ino
    assert [path for path in Path("/dev/shm").rglob("*") if path.lstat().st_ino == inode] == []


def test_the_size_is_sealed(arena: Arena) -> None:
    for size in (0, SHAPE.size_bytes - 1, SHAPE.size_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_torn_snapshot_record_is_noticed(arena: Arena) -> None:
    record = fill(arena, 0, b"s" * 5000, b"d" * 100)
    slot = arena.slot(0)
    slot[pages(5000) + 50] ^= 1
    with pytest.raises(IntegrityError, match="slot 0 is torn"):
        arena.doc(0, record)
    slot[pages(5000) + 50] ^= 1
    assert arena.doc(0, record) == b"d" * 100
    slot.release()


@pytest.mark.parametrize(
    ("shard", "doc"), [(2**64 - 1, 1), (5 * PAGE_BYTES, 0), (0, 4 * PAGE_BYTES + 1), (4 * PAGE_BYTES, 1)]
)
def test_a_record_that_claims_more_than_its_slot_is_noticed(arena: Arena, shard: int, doc: int) -> None:
    record = SlotRecord(SlotState.SEALED, shard_bytes=shard, doc_bytes=doc)
    with pytest.raises(IntegrityError, match="claims to hold more"):
        arena.doc(0, record)
    if shard > SHAPE.slot_bytes:
        with pytest.raises(IntegrityError, match="claims to hold more"):
            arena.shard(0, record)


def test_a_snapshot_may_fill_its_slot_to_the_last_byte(arena: Arena) -> None:
    record = fill(arena, 0, b"s" * 3 * PAGE_BYTES, b"d" * PAGE_BYTES)
    assert arena.doc(0, record) == b"d" * PAGE_BYTES
    assert not any(arena.slot(1))


def test_views_keep_the_mapping_and_nothing_else_does() -> None:
    made = Arena.create(SHAPE)
    mapped = re.compile(rf" {os.fstat(made.fd).st_ino} +/memfd:ckptd-arena")
    slot = made.slot(0)
    made.close()
    made.close()
    assert made.fd == -1
    slot[0] = 1
    assert mapped.search(Path("/proc/self/maps").read_text())
    slot.release()
    del made
    gc.collect()
    assert not mapped.search(Path("/proc/self/maps").read_text())


def test_r142_allocated_pages_are_charged_at_once() -> None:
    arena = Arena.create(ArenaShape(1, 4 * MIB))
    try:
        assert os.fstat(arena.fd).st_blocks * 512 < MIB
        arena.allocate()
        assert os.fstat(arena.fd).st_blocks * 512 >= 4 * MIB
        arena.populate()
        assert _resident(arena) >= 4 * MIB
    finally:
        arena.close()


def _resident(arena: Arena) -> int:
    """Bytes of the arena that are in this process's page table."""
    mapped = re.compile(rf" {os.fstat(arena.fd).st_ino} +/memfd:ckptd-arena")
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if mapped.search(line):
            return next(int(found.split()[1]) * 1024 for found in lines if found.startswith("Rss:"))
    raise AssertionError("the arena is not mapped")


def test_no_memory_for_an_arena_is_an_error_with_figures(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=f"{SHAPE.size_bytes} bytes: No space left"):
        arena.allocate()


def test_r142_more_than_the_address_space_is_an_error_with_figures_and_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for slot_bytes in (2**50, 2**62, 2**63 - PAGE_BYTES, 2**64):
        with pytest.raises(ResourceError, match=r"arena of \d+ bytes"):
            Arena.create(ArenaShape(1, slot_bytes))
    assert set(os.listdir("/proc/self/fd")) == before


def _limited() -> None:
    """In the child: 2 GiB of address space and 20 descriptors."""
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))


LIMITED = """
import os
from ckptd.arena import Arena, ArenaShape
from ckptd.errors import ResourceError
def attempt(size):
    try: return Arena.create(ArenaShape(1, size))
    except ResourceError as error: return str(error)
print(attempt(2**32))
kept = [attempt(4096)]
while not isinstance(kept[-1], str): kept.append(attempt(4096))
print(kept[-1])
"""


def test_r142_limits_of_the_process_are_errors_with_figures() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], preexec_fn=_limited, capture_output=True, text=True, timeout=60, check=False
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("cannot map an arena of 42949"), done.stderr
    assert second.startswith("cannot m")
    assert second.endswith("Too many open files")


FORKER = """
import os
from ckptd.arena import Arena, ArenaShape
arena = Arena.create(ArenaShape(1, 4096))
def mapped():
    with open("/proc/self/maps") as maps:
        return sum("/memfd:ckptd-arena" in line for line in maps)
def mapped_in_child():
    pid = os.fork()
    if pid == 0:
        os._exit(mapped())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(mapped(), mapped_in_child())
arena.hide_from_children()
print(mapped(), mapped_in_child())
arena.slot(0)[0] = 1
"""


def test_r137_children_do_not_inherit_the_mapping() -> None:
    done = subprocess.run([sys.executable, "-c", FORKER], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["1 1", "1 0"], done.stderr


# What anybody may send as an arena


def forged(header: bytes, size: int, *, seals: int | None = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, header, 0)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def signed(slots: int, slot_bytes: int, magic: bytes = b"CKPTDAR3") -> bytes:
    from xxhash import xxh3_64_intdigest

    header = struct.pack("<8s16sIIQ", magic, b"i" * 16, slots, 0, slot_bytes)
    return header + struct.pack("<Q", xxh3_64_intdigest(header))


GOOD_SIZE = ArenaShape(1, PAGE_BYTES).size_bytes


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (b"", 0, "0 bytes"),
        (signed(1, 4096)[:40], 40, "40 bytes"),
        (b"", GOOD_SIZE, "not an arena"),
        (signed(1, 4096, b"CKPTDAR9"), GOOD_SIZE, "another version"),
        (signed(1, 4096)[:47] + b"x", GOOD_SIZE, "not an arena"),
        (signed(0, 4096), GOOD_SIZE, "1 to 16 slots"),
        (signed(2**32 - 1, 4096), GOOD_SIZE, "1 to 16 slots"),
        (signed(1, 4097), GOOD_SIZE, "not whole pages"),
        (signed(1, 2**64 - 4096), GOOD_SIZE, "claims to have"),
        (signed(2, 4096), GOOD_SIZE, "claims to have"),
        (signed(1, 4096), GOOD_SIZE + 1, "claims to have"),
    ],
)
def test_what_is_no_arena_is_refused_and_stays_the_callers(header: bytes, size: int, message: str) -> None:
    fd = forged(header, size)
    with pytest.raises(FormatError, match=message):
        Arena(fd)
    os.close(fd)  # would raise had it been closed


@pytest.mark.parametrize("seals", [None, 0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_an_arena_that_its_sender_could_shrink_is_refused(seals: int | None) -> None:
    fd = forged(signed(1, 4096), GOOD_SIZE, seals=seals)
    with pytest.raises(FormatError, match="size is not sealed"):
        Arena(fd)
    os.close(fd)


def test_an_arena_that_cannot_be_written_is_refused_for_writing() -> None:
    fd = forged(signed(1, 4096), GOOD_SIZE, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    with pytest.raises(ResourceError, match="cannot map"):
        Arena(fd)
    reader = Arena(fd, writable=False)
    assert reader.records() == [SlotRecord()]
    reader.close()


def test_descriptors_of_other_kinds_are_refused(tmp_path: Path) -> None:
    left, right = socket.socketpair()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, GOOD_SIZE)
    os.pwrite(file, signed(1, 4096), 0)
    folder = os.open(tmp_path, os.O_RDONLY)
    pipe = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    others = [left.fileno(), file, folder, *pipe, null]
    try:
        for fd in others:
            with pytest.raises(FormatError, match="not an arena"):
                Arena(fd)
    finally:
        left.close()
        right.close()
        for fd in others[1:]:
            os.close(fd)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=64), size=st.integers(0, 2 * GOOD_SIZE))
def test_any_bytes_raise_only_format_error(data: bytes, size: int) -> None:
    fd = forged(data, max(size, len(data)))
    try:
        with pytest.raises(FormatError):
            Arena(fd)
    finally:
        os.close(fd)


def test_pages_round_up() -> None:
    assert [pages(n) for n in (0, 1, 4096, 4097, 2**33 + 8)] == [0, 4096, 4096, 8192, 2**33 + 4096]
    assert mmap.PAGESIZE % PAGE_BYTES == 0


def test_a_part_of_a_slot_is_mapped_before_it_is_read() -> None:
    shape = ArenaShape(2, 64 * MIB)
    first = Arena.create(shape)
    first.allocate()
    arena = Arena(os.dup(first.fd))
    try:
        where = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
        assert _resident_kib(where) < 1024
        arena.populate_slot(1, 100, 32 * MIB)
        assert 32 * 1024 <= _resident_kib(where) < 48 * 1024
        assert bytes(arena.slot(1)[:4096]) == bytes(4096)
    finally:
        arena.close()
        first.close()


def _resident_kib(address: int) -> int:
    """Of the mapping that begins there."""
    begins = f"{address:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(begins))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])
