"""Memory for what is read: huge pages as long as they come fast."""

from __future__ import annotations

import itertools
import mmap
import re
import threading
from ctypes import addressof, c_char
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd_client import fresh
from ckptd_client.fresh import CHUNK_BYTES, CHUNK_SECONDS_MAX, fresh_memory


def advised_huge(memory: memoryview, at: int) -> bool:
    """By the flags of the kernel's mapping of a byte."""
    address = addressof(c_char.from_buffer(memory, at))
    found = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ends := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(ends[1], 16), int(ends[2], 16)
        elif line.startswith("VmFlags:") and found[0] <= address < found[1]:
            return "hg" in line.split()
    raise AssertionError("not mapped")


def join() -> None:
    for thread in threading.enumerate():
        if thread.name == "ckptd-fresh":
            thread.join()


@pytest.mark.parametrize("size_bytes", [1, mmap.PAGESIZE + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
def test_is_writable_zeros_of_exactly_that_size(size_bytes: int) -> None:
    memory = fresh_memory(size_bytes)
    assert (len(memory), memory[0], memory[-1]) == (size_bytes, 0, 0)
    memory[:] = b"\x07" * size_bytes  # beside the thread
    join()
    assert bytes(memory) == b"\x07" * size_bytes


def test_nothing_at_all() -> None:
    assert len(fresh_memory(0)) == 0


@pytest.mark.parametrize("slow", [False, True])
def test_huge_pages_are_left_alone_once_they_come_slowly(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    took = CHUNK_SECONDS_MAX * (2 if slow else 0)
    clock = itertools.accumulate(itertools.cycle([0.0, took]))
    monkeypatch.setattr(fresh, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    memory = fresh_memory(3 * CHUNK_BYTES)
    join()
    assert [advised_huge(memory, number * CHUNK_BYTES) for number in range(3)] == [True, not slow, not slow]


def test_it_does_without_the_thread_where_none_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert len(fresh_memory(CHUNK_BYTES)) == CHUNK_BYTES
