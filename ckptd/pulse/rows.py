"""Rows: what a trainer has reported of each step, in shared memory, by plain stores, without a system call.

A ring of rows of one size, beside a table of the columns' names. The trainer writes a row and then the count; the
daemon reads rows and then the count again, and drops those that may have been overwritten meanwhile. What was written
survives the trainer, as the daemon holds the memory too.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ckptd.format.keys import STEP_MAX
from ckptd.limits import LOG_COLUMNS_MAX, LOG_NAME_BYTES_MAX, LOG_RING_ROWS, PAGE_BYTES
from ckptd.pulse.sealed import create_sealed, map_sealed

_log = logging.getLogger("ckptd")

_NUMBER = struct.Struct("<Q")
_put_number = _NUMBER.pack_into
_COUNT_AT, _COLUMNS_AT, _GENERATION_AT, _REFUSED_AT, _LIFE_AT = 0, 8, 16, 24, 32
_LIFE_BYTES = 16
_NAMES_START = PAGE_BYTES
_NAME_BYTES = LOG_NAME_BYTES_MAX + 1  # its length before it
_ROWS_START = _NAMES_START + LOG_COLUMNS_MAX * _NAME_BYTES
_HEAD = "<QQQdd"  # number, step, bits of the columns that have a value, unix seconds, step seconds; then the values
_HEAD_BYTES = struct.calcsize(_HEAD)
_put_head = struct.Struct(_HEAD).pack_into
_ROW_BYTES = -(-struct.calcsize(f"{_HEAD}{LOG_COLUMNS_MAX}d") // 64) * 64
ROWS_BYTES = _ROWS_START + LOG_RING_ROWS * _ROW_BYTES
NUMBER_MAX = 10**12 - 1
"""Of a row; has its place in keys."""


class Row(NamedTuple):
    """One step of one life of a trainer, as it has reported it."""

    number: int
    """Counts from 1."""
    step: int
    unix_seconds: float
    """When it was reported, by the trainer's clock."""
    step_seconds: float
    """Since the step before, without other phases; nan for a life's first."""
    values: dict[str, float]
    """Column → figure; a column without one in this row is left out."""


class Rows:
    """One writer, any number of readers, no lock."""

    def __init__(self, memory: memoryview) -> None:
        if len(memory) != ROWS_BYTES:
            raise ValueError(f"rows have {ROWS_BYTES} bytes, not {len(memory)}")
        self._memory = memory
        self._figures = memory[_ROWS_START:].cast("B").cast("d")
        """All words of all rows."""
        self._number = self.count
        """Of the row that was written last."""
        self._places: dict[str, int] = {}
        """Column → its place; -1 for one that there was no room for."""
        self._names: list[str] = []

    # The trainer's side

    def write(self, step: int, values: Mapping[str, float], unix_seconds: float, step_seconds: float) -> None:
        """Add a row. A value under a name that is too long, or beyond the most columns, is dropped and counted; the
        first time, a warning says so."""
        self._number = number = self._number + 1
        start = number % LOG_RING_ROWS * _ROW_BYTES
        figures, place_of = self._figures, self._places
        at, columns = (start + _HEAD_BYTES) // 8, 0
        for name, value in values.items():
            place = place_of.get(name)
            if place is None:
                place = self._new_column(name)
            if place >= 0:
                figures[at + place] = value
                columns |= 1 << place
        _put_head(self._memory, _ROWS_START + start, number, step, columns, unix_seconds, step_seconds)
        _put_number(self._memory, _COUNT_AT, number)

    def _new_column(self, name: str) -> int:
        data = name.encode(errors="replace")
        place = self._get(_COLUMNS_AT)
        if place >= LOG_COLUMNS_MAX or not 0 < len(data) <= LOG_NAME_BYTES_MAX:
            if len(self._places) < 2 * LOG_COLUMNS_MAX:  # names may be without end
                self._places[name] = -1
                self._refuse()
            return -1
        start = _NAMES_START + place * _NAME_BYTES
        self._memory[start] = len(data)
        self._memory[start + 1 : start + 1 + len(data)] = data
        self._places[name] = place
        _put_number(self._memory, _COLUMNS_AT, place + 1)
        return place

    def _refuse(self) -> None:
        if not self.refused:
            _log.warning(
                "the training log has room for %d names of at most %d bytes; others are dropped",
                LOG_COLUMNS_MAX,
                LOG_NAME_BYTES_MAX,
            )
        _put_number(self._memory, _REFUSED_AT, self.refused + 1)

    # Both sides

    def _get(self, at: int) -> int:
        return int(_NUMBER.unpack_from(self._memory, at)[0])

    @property
    def life(self) -> str:
        """Which life of a trainer this is, in 32 hexadecimal digits."""
        return bytes(self._memory[_LIFE_AT : _LIFE_AT + _LIFE_BYTES]).hex()

    @property
    def generation(self) -> int:
        """In which this life saves; 0 before it is known."""
        return self._get(_GENERATION_AT)

    @generation.setter
    def generation(self, generation: int) -> None:
        _put_number(self._memory, _GENERATION_AT, generation)

    @property
    def refused(self) -> int:
        """Columns that were dropped."""
        return self._get(_REFUSED_AT)

    @property
    def count(self) -> int:
        """Rows that were ever written."""
        return self._get(_COUNT_AT)

    # The daemon's side

    def since(self, number: int) -> list[Row]:
        """Rows after ``number``, oldest first. Those that the ring has lost are left out, and so is what makes no
        sense: nothing of it is believed beyond what it says."""
        newest = self.count
        names = self._column_names()
        found: list[Row] = []
        for wanted in range(max(number + 1, newest - LOG_RING_ROWS + 2, 1), min(newest, NUMBER_MAX) + 1):
            row = self._read(wanted, names)
            if row is not None:
                found.append(row)
        oldest = self.count - LOG_RING_ROWS + 2
        return [row for row in found if row.number >= oldest]

    def _read(self, wanted: int, names: list[str]) -> Row | None:
        start = _ROWS_START + (wanted % LOG_RING_ROWS) * _ROW_BYTES
        got, step, columns, unix, seconds, *values = struct.unpack_from(f"{_HEAD}{len(names)}d", self._memory, start)
        if got != wanted or step > STEP_MAX:
            return None
        named = enumerate(zip(names, values, strict=True))
        figures = {name: value for place, (name, value) in named if name and columns >> place & 1}
        return Row(got, step, unix if 0 <= unix < 1e12 else 0.0, seconds if seconds >= 0 else math.nan, figures)

    def _column_names(self) -> list[str]:
        """Empty for one that is no name."""
        count = min(self._get(_COLUMNS_AT), LOG_COLUMNS_MAX)
        while len(self._names) < count:
            start = _NAMES_START + len(self._names) * _NAME_BYTES
            length = min(self._memory[start], LOG_NAME_BYTES_MAX)
            try:
                name = bytes(self._memory[start + 1 : start + 1 + length]).decode()
            except UnicodeDecodeError:
                name = ""
            self._names.append("" if name in self._names else name)
        return self._names[:count]

    def release(self) -> None:
        """Of the memory."""
        self._figures.release()
        self._memory.release()


class MappedRows(Rows):
    """Rows in memory that two processes share. Owns its mapping; :meth:`close` gives it back."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map the rows behind ``fd``, which stays the caller's. Raises as :func:`map_sealed`."""
        self._mmap: mmap.mmap = map_sealed(fd, ROWS_BYTES, "rows", writable=writable)
        super().__init__(memoryview(self._mmap))

    def close(self) -> None:
        """Idempotent."""
        self.release()
        self._mmap.close()


def create_rows() -> int:
    """A descriptor of new rows, with a life of their own. Raises :class:`ResourceError`."""
    fd = create_sealed("rows", ROWS_BYTES)
    os.pwrite(fd, os.urandom(_LIFE_BYTES), _LIFE_AT)
    return fd
