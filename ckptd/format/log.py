"""Segments of the training log: rows of one life of a trainer, column by column, in one small object that is never
changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from ckptd.errors import FormatError, IntegrityError
from ckptd.format.digests import hex_digest
from ckptd.format.duplicates import refuse_duplicates
from ckptd.format.keys import LogKey
from ckptd.format.records import Generation, Hex, Parent, Rank, Record, Step, Text, Token, decode, encode
from ckptd.limits import LOG_COLUMNS_MAX, LOG_SEGMENT_ROWS_MAX

Figure = float | Literal["nan", "inf", "-inf"] | None
"""``None``: the row has none in this column."""
Figures = Annotated[tuple[Figure, ...], msgspec.Meta(max_length=LOG_SEGMENT_ROWS_MAX)]
_WORDS: dict[Literal["nan", "inf", "-inf"], float] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Segment(msgspec.Struct, kw_only=True, frozen=True):
    """Consecutive rows, at least one."""

    columns: Annotated[dict[Text, Figures], msgspec.Meta(max_length=LOG_COLUMNS_MAX)]
    """Each as long as ``steps``."""
    first: Annotated[int, msgspec.Meta(ge=1, le=10**12 - 1)]
    """The number of the first row; the life's first row is 1."""
    generation: Generation
    life: Hex
    """Of the trainer."""
    parent: Parent | None
    """The checkpoint from which the generation was opened."""
    rank: Rank
    run: Token
    step_seconds: Figures
    """How long each step took, without other phases."""
    steps: Annotated[tuple[Step, ...], msgspec.Meta(min_length=1, max_length=LOG_SEGMENT_ROWS_MAX)]
    unix_seconds: Annotated[tuple[float, ...], msgspec.Meta(max_length=LOG_SEGMENT_ROWS_MAX)]
    """When each was reported, by the trainer's clock."""

    @property
    def key(self) -> LogKey:
        """Where it lies."""
        return LogKey(self.generation, self.rank, self.life, self.first, self.first + len(self.steps) - 1)


class Log(Record, kw_only=True, frozen=True):
    """A segment, and a digest by which it is known to be whole."""

    kind: Literal["log"] = msgspec.field(default_factory=lambda: "log")
    digest: Hex
    """Of ``segment`` as it stands here."""
    segment: msgspec.Raw


def figure(value: float) -> Figure:
    """As a segment has it."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def number(found: Figure) -> float | None:
    """The inverse of :func:`figure`; ``None`` where there is none."""
    return _WORDS[found] if isinstance(found, str) else found


def columns_of(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[Figure, ...]]:
    """Rows turned into columns: all that any of them has, sorted."""
    names = sorted({name for row in rows for name in row})
    return {name: tuple(figure(row[name]) if name in row else None for row in rows) for name in names}


def encode_segment(segment: Segment) -> bytes:
    """The object of a segment; equal segments are equal bytes."""
    inside = encode(segment)
    return encode(Log(digest=hex_digest(inside), segment=msgspec.Raw(inside)))


def decode_segment(data: bytes | memoryview) -> Segment:
    """Raises :class:`FormatError` for what is no segment, and :class:`IntegrityError` for one that is damaged."""
    log = decode(data, Log)
    if hex_digest(memoryview(log.segment)) != log.digest:
        raise IntegrityError("a log segment differs from its digest")
    try:
        segment = msgspec.json.decode(log.segment, type=Segment)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise FormatError(f"malformed log segment: {error}") from None
    refuse_duplicates(memoryview(log.segment), encode(segment))
    for name, column in (
        *segment.columns.items(),
        ("step_seconds", segment.step_seconds),
        ("unix_seconds", segment.unix_seconds),
    ):
        if len(column) != len(segment.steps):
            raise FormatError(f"a log segment of {len(segment.steps)} rows has {len(column)} in {name[:64]!r}")
    return segment
