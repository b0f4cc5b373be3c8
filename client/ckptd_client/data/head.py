"""Reads one source from a position on, pass after pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptd.errors import MismatchError, UsageError
from ckptd_client.data.position import SourcePosition
from ckptd_client.data.seeds import mixed
from ckptd_client.data.sources import Counted, Sized, Source


class Head:
    """A place in a source, and what was opened there.

    Samples are records, or with ``length`` runs of so many tokens of the records laid end to end: the tokens of a
    record that was cut, and those that a pass leaves over, come first in the next run. Equal positions are written
    alike, whether samples were given or passed over.
    """

    def __init__(
        self, name: str, source: Source, *, seed: int, shuffle: bool, lane: int, lanes: int, length: int | None
    ) -> None:
        """``lane`` of ``lanes``: which share of the shards is read."""
        self._name = name
        self._source = source
        self._counted = source if isinstance(source, Counted) else None
        self._sized = source if isinstance(source, Sized) and length is not None else None
        self._seed = seed
        self._shuffle = shuffle
        self._lane, self._lanes = lane, lanes
        self._length = length
        self._limit: int | None = None
        self._at = SourcePosition()
        self._order = (-1, list[str]())  # of which pass, and its shards
        self._ends = ("", np.zeros(0, np.int64))  # of which shard, and where its records end, in tokens
        self._records: Iterator[Any] | None = None
        self._document: npt.NDArray[np.int64] | None = None
        self._barren: int | None = None  # records given when the last pass began

    def go(self, position: SourcePosition, limit: int | None) -> None:
        """Go to a position. Passes up to number ``limit`` are given; ``None``: without end."""
        self._limit = limit
        if position != self._at:
            self._at = position
            self._barren = None
            self._forget()

    @property
    def position(self) -> SourcePosition:
        """Where the next sample begins; undefined after one that could not be given."""
        return self._at

    def take(self) -> Any | None:
        """The next sample. ``None``: less than one is left."""
        sample = self._take_record() if self._length is None else self._take_tokens(self._length)
        self._settle()
        return sample

    def skip(self, count: int) -> int:
        """Pass over samples; how many there were. Reads nothing where the source knows its counts."""
        if count == 0:
            return 0
        if self._length is None and self._counted is not None:
            done = self._skip_records(self._counted, count)
        elif self._length is not None and self._sized is not None:
            done = self._skip_tokens(self._sized, count * self._length) // self._length
        else:
            return next((done for done in range(count) if self.take() is None), count)
        self._forget()
        self._settle()
        return done

    # Samples

    def _take_record(self) -> Any | None:
        for record in self._next_record():
            self._move(record=self._at.record + 1, records=self._at.records + 1)
            return record
        return None

    def _take_tokens(self, length: int) -> npt.NDArray[np.int64] | None:
        parts: list[npt.NDArray[np.int64]] = []
        wanted = length
        while wanted:
            if self._document is None:
                for record in self._next_record():
                    self._document = np.asarray(record).reshape(-1)
                    break
                else:
                    return None
                self._check_length(len(self._document))
            part = self._document[self._at.offset : self._at.offset + wanted]
            parts.append(part.astype(np.int64))
            wanted -= len(part)
            self._move(offset=self._at.offset + len(part), tokens=self._at.tokens + len(part))
            if self._at.offset >= len(self._document):
                self._document = None
                self._move(record=self._at.record + 1, records=self._at.records + 1, offset=0)
        return np.concatenate(parts)

    def _check_length(self, tokens: int) -> None:
        if self._at.offset > tokens:
            at = f"record {self._at.record} of {self._shard} in source {self._name}"
            raise MismatchError(f"{at} has {tokens} tokens, and {self._at.offset} of it were given before")

    def _next_record(self) -> Iterator[Any]:
        """The record at the position, or nothing at the end of the last pass."""
        while self._in_shard():
            if self._records is None:
                self._records = self._source.open(self._shard, self._at.record)
            for record in self._records:
                yield record
                return
            self._next_shard()

    def _skip_records(self, source: Counted, count: int) -> int:
        done = 0
        while done < count and self._in_shard():
            passed = min(source.count(self._shard) - self._at.record, count - done)
            done += passed
            self._move(record=self._at.record + passed, records=self._at.records + passed)
            self._settle()
        return done

    def _skip_tokens(self, source: Sized, tokens: int) -> int:
        done = 0
        while done < tokens and self._in_shard():
            ends = self._ends_of(source, self._shard)
            at = self._start_of(ends, self._at.record) + self._at.offset
            target = min(at + tokens - done, int(ends[-1]) if len(ends) else 0)
            record = int(np.searchsorted(ends, target, side="right"))
            self._move(
                record=record,
                offset=target - self._start_of(ends, record),
                records=self._at.records + record - self._at.record,
                tokens=self._at.tokens + target - at,
            )
            done += target - at
            self._settle()
        return done

    # Shards and passes

    @property
    def _shards(self) -> list[str]:
        """The shards of this lane in the order of the pass. Lanes keep their shards: no pass moves one to another."""
        if self._order[0] != self._at.passes:
            shards = list(self._source.shards)[self._lane :: self._lanes]
            if self._shuffle:
                draws = {shard: mixed(self._seed, self._name, self._at.passes, shard) for shard in shards}
                shards.sort(key=draws.__getitem__)
            self._order = (self._at.passes, shards)
        return self._order[1]

    @property
    def _shard(self) -> str:
        return self._shards[self._at.shard]

    def _in_shard(self) -> bool:
        """Go to the next pass where this one is over. False at the end of the last one."""
        if self._at.shard < len(self._shards):
            return True
        if self._limit is not None and self._at.passes >= self._limit:
            return False
        if self._barren == self._at.records:
            raise UsageError(f"source {self._name} has no record in a whole pass")
        self._barren = self._at.records
        self._move(passes=self._at.passes + 1, shard=0)
        return self._in_shard()

    def _next_shard(self) -> None:
        self._forget()
        self._move(shard=self._at.shard + 1, record=0, offset=0)

    def _settle(self) -> None:
        """Bring the position into the form that it has however it was reached, where counts are known."""
        if self._counted is None:
            return
        while self._at.shard < len(self._shards):
            if self._sized is not None:
                ends = self._ends_of(self._sized, self._shard)
                at = self._start_of(ends, self._at.record) + self._at.offset
                record = int(np.searchsorted(ends, at, side="right"))
                if record != self._at.record:
                    self._move(record=record, offset=0, records=self._at.records + record - self._at.record)
                    self._forget()
            if self._at.record < self._counted.count(self._shard):
                return
            self._next_shard()

    def _ends_of(self, source: Sized, shard: str) -> npt.NDArray[np.int64]:
        if self._ends[0] != shard:
            self._ends = (shard, np.cumsum(np.asarray(source.sizes(shard), np.int64)))
        return self._ends[1]

    @staticmethod
    def _start_of(ends: npt.NDArray[np.int64], record: int) -> int:
        return int(ends[record - 1]) if record else 0

    def _move(self, **changes: Any) -> None:
        self._at = replace(self._at, **changes)

    def _forget(self) -> None:
        self._records = self._document = None
