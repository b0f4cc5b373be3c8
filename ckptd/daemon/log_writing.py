"""Storing the rows of one life of a trainer at one root: in segments that are never changed, the last of which is
followed by a longer one as long as it is short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from ckptd.checkpoint.concurrency import in_thread
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.training_log import log_keys
from ckptd.daemon.fencing import check_run
from ckptd.errors import StorageError, first_line
from ckptd.format.keys import LogKey, log_prefix
from ckptd.format.log import Segment, columns_of, encode_segment, figure
from ckptd.format.records import Parent
from ckptd.limits import LOG_SEGMENT_ROWS_MAX
from ckptd.pulse.rows import Row
from ckptd.storage import Backend

log = logging.getLogger(__name__)


class Waiting:
    """Rows of one life that are not stored everywhere yet, in order of their numbers."""

    def __init__(self, rows_max: int) -> None:
        self.newest = 0
        """The highest number that was ever among them."""
        self._rows: deque[Row] = deque(maxlen=rows_max)  # beyond, the oldest go: a gap in the numbers tells

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """New ones."""
        self._rows.extend(rows)
        if rows:
            self.newest = rows[-1].number

    def stretch(self, first: int) -> tuple[list[Row], bool]:
        """The next rows from number ``first`` on that have consecutive numbers, as many as a segment takes; and whether
        no further one can ever follow in it."""
        found: list[Row] = []
        for row in self._rows:
            if row.number < first:
                continue
            if found and (row.number != found[-1].number + 1 or len(found) == LOG_SEGMENT_ROWS_MAX):
                return found, True
            found.append(row)
        return found, len(found) == LOG_SEGMENT_ROWS_MAX

    def forget(self, first: int) -> None:
        """Those before number ``first`` are needed by nobody."""
        while self._rows and self._rows[0].number < first:
            self._rows.popleft()


class LogWriter:
    """At one root. What fails is logged and shown, and tried again."""

    def __init__(self, backend: Backend, rank: int, life: str, waiting: Waiting) -> None:
        self.backend = backend
        self.stored = 0
        """Up to this number all rows are durable, or lost."""
        self.lost = 0
        """Rows that were gone before they could be stored."""
        self.failures = 0
        """In a row."""
        self.error = ""
        self.tried_seconds = time.monotonic()
        """When it began to write last."""
        self.task: asyncio.Task[None] | None = None
        """While it writes."""
        self._rank = rank
        self._life = life
        self._waiting = waiting
        self._run: Run | None = None
        self._parent: Parent | None = None
        self._tail: tuple[int, LogKey | None] = 1, None
        """The number with which the last segment begins, and its name once it is there."""

    @property
    def needed(self) -> int:
        """The number of the first row that it may store again."""
        return self._tail[0]

    @property
    def behind(self) -> bool:
        """There is something to be stored."""
        return self.stored < self._waiting.newest

    @property
    def writing(self) -> bool:
        return self.task is not None and not self.task.done()

    async def write(self, generation: int) -> None:
        """Store all that waits. Never raises."""
        self.tried_seconds = time.monotonic()
        try:
            run = self._run or await self._begin(generation)
            await check_run(self.backend, run.id)
            while self.behind:
                await self._write_segment(run, generation)
        except Exception as error:
            self.failures += 1
            self.error = first_line(error)
            if self.failures == 1:
                log.warning("%s: the training log cannot be stored: %s", self.backend.url, self.error)
        else:
            self.failures, self.error = 0, ""

    async def _begin(self, generation: int) -> Run:
        """Whose log it is, and what of it an earlier daemon has stored."""
        run = await Run.open(self.backend)
        self._parent = (await run.generation(generation)).opened_from
        stored = [
            key.last
            for key in await log_keys(run, rank=self._rank, prefix=log_prefix(generation))
            if key.life == self._life
        ]
        self.stored = max(stored, default=0)
        self._tail = self.stored + 1, None
        self._run = run
        return run

    async def _write_segment(self, run: Run, generation: int) -> None:
        first, before = self._tail
        rows, complete = self._waiting.stretch(first)
        if before is not None and rows[0].number > first:  # too much waits: the last segment cannot be made longer
            before = None
            rows, complete = self._waiting.stretch(self.stored + 1)
        self.lost += max(rows[0].number - self.stored - 1, 0)
        segment = Segment(
            columns={},
            first=rows[0].number,
            generation=generation,
            life=self._life,
            parent=self._parent,
            rank=self._rank,
            run=run.id,
            step_seconds=(),
            steps=tuple(row.step for row in rows),
            unix_seconds=tuple(row.unix_seconds for row in rows),
        )
        await self.backend.put(str(segment.key), await in_thread(_encoded, segment, rows))
        self.stored = rows[-1].number
        self._tail = (self.stored + 1, None) if complete else (segment.first, segment.key)
        if before is not None and before != segment.key:
            # What stays for a while, as it cannot be deleted, is read past.
            with contextlib.suppress(StorageError, ExceptionGroup):
                await self.backend.delete([str(before)])


def _encoded(segment: Segment, rows: Sequence[Row]) -> bytes:
    seconds = tuple(figure(row.step_seconds) if row.step_seconds >= 0 else None for row in rows)
    columns = columns_of([row.values for row in rows])
    return encode_segment(msgspec.structs.replace(segment, columns=columns, step_seconds=seconds))
