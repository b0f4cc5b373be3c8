"""Rows come out as they went in; what was overwritten, or makes no sense, is left out."""

from __future__ import annotations

import math
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import FormatError
from ckptd.limits import LOG_COLUMNS_MAX, LOG_NAME_BYTES_MAX, LOG_RING_ROWS
from ckptd.pulse import Phase, Pulse
from ckptd.pulse.rows import ROWS_BYTES, MappedRows, Rows


def ring() -> tuple[memoryview, Rows]:
    memory = memoryview(bytearray(ROWS_BYTES))
    return memory, Rows(memory)


def write(rows: Rows, step: int, /, **values: float) -> None:
    rows.write(step, values, unix_seconds=1.8e9 + step, step_seconds=0.5)


FIGURES = st.dictionaries(st.text(min_size=1, max_size=15), st.floats(), max_size=10)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(FIGURES, max_size=8))
def test_rows_come_out_as_they_went_in(steps: list[dict[str, float]]) -> None:
    memory, rows = ring()
    for number, values in enumerate(steps, 1):
        write(rows, 10 * number, **values)
    found = Rows(memory).since(0)
    assert [row.number for row in found] == list(range(1, len(steps) + 1))
    kept: set[str] = set()
    for row, values in zip(found, steps, strict=True):
        for name in values:
            if len(kept) < LOG_COLUMNS_MAX:
                kept.add(name)
        names = kept & values.keys()
        assert row.step == 10 * row.number
        assert (row.unix_seconds, row.step_seconds) == (1.8e9 + row.step, 0.5)
        assert {name: struct.pack("d", value) for name, value in row.values.items()} == {
            name: struct.pack("d", values[name]) for name in names
        }


def test_a_figure_that_was_not_reported_is_not_there() -> None:
    memory, rows = ring()
    write(rows, 1, loss=1.5, tokens=100)
    write(rows, 2, grad_norm=math.nan)
    write(rows, 3)
    first, second, third = Rows(memory).since(0)
    assert first.values == {"loss": 1.5, "tokens": 100.0}
    assert list(second.values) == ["grad_norm"]
    assert math.isnan(second.values["grad_norm"])
    assert third.values == {}


def test_a_reader_that_is_late_gets_the_newest_and_can_tell() -> None:
    memory, rows = ring()
    reader = Rows(memory)
    for step in range(1, 101):
        write(rows, step, loss=step)
    assert [row.number for row in reader.since(90)] == list(range(91, 101))
    for step in range(101, 3 * LOG_RING_ROWS + 1):
        write(rows, step, loss=step)
    found = reader.since(100)
    assert found[-1].step == 3 * LOG_RING_ROWS
    assert LOG_RING_ROWS - 2 <= len(found) < LOG_RING_ROWS
    assert [row.values["loss"] for row in found] == [float(row.number) for row in found]
    assert found[-1].number - 100 - len(found) == 2 * LOG_RING_ROWS - 100 + LOG_RING_ROWS - len(found)


def test_what_is_overwritten_while_it_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, rows = ring()
    for step in range(1, LOG_RING_ROWS):
        write(rows, step, loss=step)
    reader = Rows(memory)
    read = Rows._read

    def slow(self: Rows, wanted: int, names: list[str]) -> object:
        if wanted == 50:
            for step in range(LOG_RING_ROWS, LOG_RING_ROWS + 100):
                write(rows, step, loss=-1)
        return read(self, wanted, names)

    monkeypatch.setattr(Rows, "_read", slow)
    found = reader.since(0)
    assert [row.number for row in found] == list(range(101, LOG_RING_ROWS))
    assert all(row.values["loss"] == row.step for row in found)


def test_columns_beyond_the_most_and_names_that_are_too_long_are_counted() -> None:
    memory, rows = ring()
    many = {f"c{number}": float(number) for number in range(LOG_COLUMNS_MAX + 3)}
    for step in range(1, 4):
        write(rows, step, **many, **{"x" * (LOG_NAME_BYTES_MAX + 1): 1.0})
    reader = Rows(memory)
    found = reader.since(0)
    assert reader.refused == 4
    assert all(list(row.values) == list(many)[:LOG_COLUMNS_MAX] for row in found)


def test_garbage_costs_nothing() -> None:
    memory, rows = ring()
    write(rows, 1, loss=1.0)
    write(rows, 2, loss=2.0)
    struct.pack_into("<Q", memory, 0, 2**64 - 1)
    assert Rows(memory).since(0) == []
    struct.pack_into("<QQ", memory, 0, 2, 2**64 - 1)
    assert [row.values for row in Rows(memory).since(0)] == [{"loss": 1.0}, {"loss": 2.0}]
    memory[4096] = 255
    memory[4097:4100] = b"\xff\xfe\xfd"
    assert [row.values for row in Rows(memory).since(0)] == [{}, {}]
    with pytest.raises(ValueError, match="rows have"):
        Rows(memory[:4096])


def test_memory_of_another_size_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROWS_BYTES)
    with pytest.raises(FormatError, match="not rows"):
        MappedRows(fd, writable=False)  # it could be truncated
    os.close(fd)


def test_a_step_takes_no_time_that_was_spent_on_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    pulse = Pulse()

    def later(seconds: float) -> None:
        now[0] += int(seconds * 1e9)

    later(50)
    assert math.isnan(pulse.step(1))  # nobody knows when it began
    later(2)
    assert pulse.step(2) == 2.0
    later(1)
    with pulse.phase(Phase.EVAL):
        later(100)
        with pulse.phase(Phase.SAVE):
            later(10)
        later(5)
    later(1)
    assert pulse.step(3) == 2.0
    lost = pulse.phase(Phase.OTHER)
    lost.__enter__()  # its end does not come
    later(30)
    assert pulse.step(4) == 0.0
    later(3)
    assert pulse.step(5) == 3.0
    pulse.close()


def test_a_trainer_without_a_log_hands_in_none() -> None:
    for logs in (True, False):
        pulse = Pulse(logs=logs)
        pulse.log(1, {"loss": 1.0}, unix_seconds=1.0, step_seconds=1.0)
        assert [part for part, _ in pulse.parts()].count("rows") == logs
        assert pulse.parts()[-1][0] == "page"
        pulse.close()
        pulse.log(2, {"loss": 1.0}, unix_seconds=1.0, step_seconds=1.0)  # late, and of no effect
