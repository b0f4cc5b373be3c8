"""Slot records: a writer that dies half-way leaves the record before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.arena.slots import RECORD_BYTES, SlotRecord, SlotState, read_record, write_record
from ckptd.errors import FormatError
from ckptd.format.keys import Version

WRITTEN_BYTES = 88
"""Of one copy of a record: fields and checksum."""

uint64 = st.integers(0, 2**64 - 1)
records = st.builds(
    SlotRecord,
    state=st.sampled_from(SlotState),
    step=uint64,
    generation=st.integers(0, 2**32 - 1),
    ticket=uint64,
    shard_bytes=uint64,
    doc_bytes=uint64,
    doc_digest=st.binary(min_size=16, max_size=16),
    pid=uint64,
    held_bytes=uint64,
)


def memory() -> memoryview:
    return memoryview(bytearray(2 * RECORD_BYTES))


def test_memory_never_written_is_a_free_slot() -> None:
    assert read_record(memory()) == (0, SlotRecord())
    assert SlotRecord().state is SlotState.FREE


@given(st.lists(records, min_size=1, max_size=5))
def test_the_last_record_written_is_read(written: list[SlotRecord]) -> None:
    copies = memory()
    for sequence, record in enumerate(written, 1):
        write_record(copies, record)
        assert read_record(copies) == (sequence, record)


@settings(max_examples=60)
@given(records, records, st.data())
def test_r61_a_torn_write_leaves_the_record_before(old: SlotRecord, new: SlotRecord, data: st.DataObject) -> None:
    copies = memory()
    times = data.draw(st.integers(0, 2))  # into either place, or over memory that was never written
    for _ in range(times):
        write_record(copies, old)
    old = old if times else SlotRecord()
    before = bytes(copies)
    write_record(copies, new)
    after = bytes(copies)
    changed = [i for i in range(len(after)) if before[i] != after[i]]
    for cut in changed:
        torn = memoryview(bytearray(after[:cut] + before[cut:]))
        assert read_record(torn)[1] in (old, new)
        write_record(torn, new)  # and the next write goes well
        assert read_record(torn)[1] == new


def test_a_damaged_newest_copy_gives_the_one_before() -> None:
    copies = memory()
    first, second = SlotRecord(SlotState.SEALED, step=1, ticket=1), SlotRecord(SlotState.DURABLE, step=1, ticket=1)
    write_record(copies, first)
    write_record(copies, second)
    newest = (2 % 2) * RECORD_BYTES
    for position in range(newest, newest + WRITTEN_BYTES):
        damaged = memoryview(bytearray(copies))
        damaged[position] ^= 0xFF
        assert read_record(damaged) == (1, first)


def test_a_state_that_does_not_exist_counts_as_damage() -> None:
    copies = memory()
    write_record(copies, SlotRecord(SlotState.SEALED))
    write_record(copies, replace(SlotRecord(), state=9))  # type: ignore[arg-type]
    assert read_record(copies)[1].state is SlotState.SEALED


def test_two_damaged_copies_are_an_error_not_a_free_slot() -> None:
    copies = memory()
    for _ in range(2):
        write_record(copies, SlotRecord(SlotState.SEALED))
    copies[20] ^= 1
    copies[RECORD_BYTES + 20] ^= 1
    with pytest.raises(FormatError, match="both copies"):
        read_record(copies)


@given(st.binary(min_size=2 * RECORD_BYTES, max_size=2 * RECORD_BYTES))
def test_random_memory_is_an_error(data: bytes) -> None:
    if any(data[:WRITTEN_BYTES]) and any(data[RECORD_BYTES : RECORD_BYTES + WRITTEN_BYTES]):
        with pytest.raises(FormatError):
            read_record(memoryview(bytearray(data)))


def test_states_have_the_values_that_lie_in_memory() -> None:
    assert {state.name: state.value for state in SlotState} == {"FREE": 0, "FILLING": 1, "SEALED": 2, "DURABLE": 3}


def test_a_record_names_its_checkpoint() -> None:
    assert SlotRecord(step=7, generation=3).version == Version(7, 3)
