"""The status page: beats come out as they went in, and those that were overwritten are left out."""

from __future__ import annotations

import math
import struct
import time

import pytest

from ckptd.pulse.page import RING_BEATS, STATUS_BYTES, Phase, StatusPage


def page() -> tuple[memoryview, StatusPage]:
    memory = memoryview(bytearray(STATUS_BYTES))
    return memory, StatusPage(memory)


def test_no_beat_yet() -> None:
    _, status = page()
    assert status.count() == 0
    assert status.last() is None
    assert status.since(0) == []


def test_beats_come_out_as_they_went_in() -> None:
    _, status = page()
    before = time.monotonic_ns(), time.time()
    status.beat(2**40, Phase.STEP, loss=0.1, grad_norm=math.inf)
    status.beat(2**40 + 1, Phase.SAVE)
    after = time.monotonic_ns(), time.time()
    first, second = status.since(0)
    assert (first.number, first.step, first.phase, first.loss, first.grad_norm) == (
        1,
        2**40,
        Phase.STEP,
        0.1,
        math.inf,
    )
    assert (second.number, second.step, second.phase) == (2, 2**40 + 1, Phase.SAVE)
    assert math.isnan(second.loss)
    assert math.isnan(second.grad_norm)
    assert before[0] <= first.monotonic_ns <= second.monotonic_ns <= after[0]
    assert before[1] <= first.unix_seconds <= after[1]
    assert [beat.number for beat in status.since(1)] == [2]
    assert status.since(2) == []
    last = status.last()
    assert last is not None
    assert last.number == 2


def test_a_ring_that_went_round_gives_the_newest() -> None:
    _, status = page()
    for step in range(1, 3 * RING_BEATS + 1):
        status.beat(step, Phase.STEP)
    beats = status.since(0)
    assert [beat.step for beat in beats] == list(range(3 * RING_BEATS + 1 - len(beats), 3 * RING_BEATS + 1))
    assert RING_BEATS - 2 <= len(beats) < RING_BEATS
    assert all(beat.number == beat.step for beat in beats)


def test_a_reader_that_is_overtaken_leaves_out_what_was_overwritten() -> None:
    memory, status = page()
    for step in range(1, 11):
        status.beat(step, Phase.STEP)
    struct.pack_into("<Q", memory, 4096 + 64 * 5, 5 + RING_BEATS)  # beat 5 is being overwritten
    struct.pack_into("<I", memory, 4096 + 64 * 7 + 24, 99)  # a phase of a later release
    assert [beat.number for beat in status.since(0)] == [1, 2, 3, 4, 6, 8, 9, 10]


def test_a_count_that_is_garbage_costs_nothing() -> None:
    memory, status = page()
    status.beat(1, Phase.STEP)
    struct.pack_into("<Q", memory, 0, 2**64 - 1)
    assert status.since(0) == []
    assert status.last() is None


def test_a_page_has_one_size() -> None:
    with pytest.raises(ValueError, match="65536"):
        StatusPage(memoryview(bytearray(4096)))
