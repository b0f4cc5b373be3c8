"""The training log of a run, read from its segments: what is damaged is named, and the rest is there."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.objects import DAMAGED, place
from ckptd.checkpoint.run import RECORDS_IN_FLIGHT, Run
from ckptd.errors import FormatError, IntegrityError, NotFound, TooLarge
from ckptd.format.keys import LOG, LogKey, Version
from ckptd.format.log import Figure, Segment, decode_segment, number
from ckptd.limits import LOG_SEGMENT_BYTES_MAX

LISTED_AGAIN_MAX = 3
"""So often it is looked what there is, where a segment goes while others are read."""


class LoggedStep(NamedTuple):
    """One row of the log."""

    generation: int
    step: int
    unix_seconds: float
    step_seconds: float | None
    """Without saving, evaluating and the like; ``None`` for the first step of a generation."""
    values: dict[str, float]
    """Column → figure. One that was not reported is left out; nan and infinities are as they were reported."""
    rolled_back: bool
    """A later generation went back to before it, so nothing of today's state comes from it."""


class _Part:
    """Rows of one segment, small in memory."""

    def __init__(self, segment: Segment) -> None:
        self.key = segment.key
        self.parent = None if segment.parent is None else segment.parent.version
        self.steps = array("q", segment.steps)
        self.unix_seconds = array("d", segment.unix_seconds)
        self.step_seconds = _Column(segment.step_seconds)
        self.columns = {name: _Column(figures) for name, figures in segment.columns.items()}

    def row(self, at: int, *, rolled_back: bool) -> LoggedStep:
        values = {name: value for name, column in self.columns.items() if (value := column.at(at)) is not None}
        seconds = self.step_seconds.at(at)
        return LoggedStep(self.key.generation, self.steps[at], self.unix_seconds[at], seconds, values, rolled_back)


class _Column:
    def __init__(self, figures: Sequence[Figure]) -> None:
        found = [number(figure) for figure in figures]
        self._values = array("d", [0.0 if value is None else value for value in found])
        self._there = bytes(value is not None for value in found)

    def at(self, row: int) -> float | None:
        return self._values[row] if self._there[row] else None


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """What there is of it. Rows come in order of generation, and in each as they were reported."""

    columns: tuple[str, ...]
    """Sorted."""
    missing: Mapping[int, int]
    """Generation → rows that were reported and are not here: lost in memory, or in a segment that is damaged."""
    notes: tuple[str, ...]
    """What cannot be read, by name."""
    parts: Sequence[_Part]
    reach: Mapping[int, int | None]
    """Generation that today's state comes from → its last step that it does; ``None``: all of them."""

    def __iter__(self) -> Iterator[LoggedStep]:
        for part, start in self._fresh():
            for at in range(start, len(part.steps)):
                yield part.row(at, rolled_back=self._rolled_back(part.key.generation, part.steps[at]))

    def __len__(self) -> int:
        return sum(len(part.steps) - start for part, start in self._fresh())

    def _fresh(self) -> Iterator[tuple[_Part, int]]:
        """Each part, and where in it rows begin that no part before it has: a segment may hold the rows of one that was
        to be deleted after it."""
        for _, life in groupby(self.parts, key=lambda part: (part.key.generation, part.key.rank, part.key.life)):
            last = 0
            for part in life:
                start = max(last + 1 - part.key.first, 0)
                if start < len(part.steps):
                    yield part, start
                last = max(last, part.key.last)

    def _rolled_back(self, generation: int, step: int) -> bool:
        if generation not in self.reach:
            return True
        last = self.reach[generation]
        return last is not None and step > last


async def read_log(run: Run, *, rank: int = 0, last: int | None = None) -> TrainingLog:
    """The log of one rank. ``last``: only the newest rows, at least so many where there are so many; less is read then.

    Raises :class:`StorageError` where the store cannot tell. A segment that is damaged is named in ``notes``.
    """
    read: dict[LogKey, _Part | None] = {}
    notes: dict[LogKey, str] = {}

    async def look(key: LogKey) -> bool:
        """Whether it was there."""
        try:
            read[key] = _Part(await _segment(run, key))
        except NotFound:
            return False
        except (FormatError, IntegrityError) as error:
            read[key], notes[key] = None, error.message
        return True

    wanted: list[LogKey] = []
    for _ in range(LISTED_AGAIN_MAX):
        wanted = _newest(await log_keys(run, rank=rank), last)
        # Who grows the last segment deletes the old one of it, and by then the new one is there.
        if all(await each([key for key in wanted if key not in read], RECORDS_IN_FLIGHT, look)):
            break
    parts = [part for key in wanted if (part := read.get(key)) is not None]
    parents = {part.key.generation: part.parent for part in parts}
    for generation in {key.generation for key in wanted} - parents.keys():
        with contextlib.suppress(NotFound, FormatError, IntegrityError):  # its segments are damaged, and are named
            found = (await run.generation(generation)).opened_from
            parents[generation] = None if found is None else found.version
    return TrainingLog(
        columns=tuple(sorted({name for part in parts for name in part.columns})),
        missing=_missing(wanted, parts, whole=last is None),
        notes=tuple(note for key, note in sorted(notes.items()) if key in wanted),
        parts=parts,
        reach=reach(parents),
    )


async def log_keys(run: Run, *, rank: int | None = None, prefix: str = LOG) -> list[LogKey]:
    """The segments that are there, in order of generation, rank, life and row."""
    found: list[LogKey] = []
    async for info in run.backend.scan(prefix):
        with contextlib.suppress(FormatError):  # a foreign name
            key = LogKey.parse(info.key)
            if rank in (None, key.rank):
                found.append(key)
    return sorted(found)


def reach(parents: Mapping[int, Version | None]) -> dict[int, int | None]:
    """Which generations today's state comes from, and up to which step of each. ``parents``: of each generation that
    has logged a step, the checkpoint from which it was opened. It begins with the newest of them: whatever has stepped
    has gone back over what came before, committed or not."""
    found: dict[int, int | None] = {}
    generation: int | None = max(parents, default=None)
    step: int | None = None
    while generation is not None:
        found[generation] = step
        parent = parents.get(generation)
        # A parent is always older, so this ends even where records lie.
        if parent is None or parent.generation >= generation:
            break
        generation, step = parent.generation, parent.step
    return found


async def _segment(run: Run, key: LogKey) -> Segment:
    where = place(run.backend, str(key))
    try:
        segment = decode_segment(await run.backend.get(str(key), limit_bytes=LOG_SEGMENT_BYTES_MAX))
    except TooLarge as error:
        raise FormatError(f"{where}: {error.message}", hint=DAMAGED) from None
    except (FormatError, IntegrityError) as error:
        raise type(error)(f"{where}: {error.message}", hint=DAMAGED) from None
    if (segment.key, segment.run) != (key, run.id):
        raise IntegrityError(f"{where} is {segment.key} of run {segment.run}", hint=DAMAGED)
    return segment


def _covers(one: LogKey, other: LogKey) -> bool:
    same = (one.generation, one.rank, one.life) == (other.generation, other.rank, other.life)
    return same and one.first <= other.first and other.last <= one.last


def _newest(keys: Sequence[LogKey], rows: int | None) -> list[LogKey]:
    """The last ones that hold so many rows; ``None``: all."""
    if rows is None:
        return list(keys)
    found: list[LogKey] = []
    for key in reversed(keys):
        if rows <= 0:
            break
        if not any(_covers(other, key) for other in found):
            rows -= key.last - key.first + 1
        found.append(key)
    return found[::-1]


def _missing(wanted: Sequence[LogKey], parts: Sequence[_Part], *, whole: bool) -> dict[int, int]:
    """Rows of which a life has numbers and no part has the content. ``whole``: from each life's first row on."""
    found: dict[int, int] = {}
    for (generation, life), keys in groupby(wanted, key=lambda key: (key.generation, key.life)):
        of_life = list(keys)
        reached = 0 if whole else of_life[0].first - 1
        missing = 0
        for there in [part.key for part in parts if (part.key.generation, part.key.life) == (generation, life)]:
            missing += max(there.first - reached - 1, 0)
            reached = max(reached, there.last)
        missing += max(max(key.last for key in of_life) - reached, 0)
        if missing:
            found[generation] = found.get(generation, 0) + missing
    return found
