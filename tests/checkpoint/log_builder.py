"""Segments of a training log, put where they belong."""

from __future__ import annotations

from ckptd.checkpoint.run import Run
from ckptd.format.keys import Version
from ckptd.format.log import Segment, columns_of, encode_segment
from ckptd.format.records import Parent

LIFE = "0123456789abcdef" * 2


async def put(
    run: Run,
    generation: int,
    steps: range,
    *,
    first: int = 1,
    opened_from: Version | None = None,
    rank: int = 0,
    life: str = LIFE,
    loss: float = 1.0,
) -> str:
    """A segment of these steps, which count the tokens; its key."""
    parent = None if opened_from is None else Parent(generation=opened_from.generation, step=opened_from.step)
    segment = Segment(
        columns=columns_of([{"loss": loss, "tokens": float(step)} for step in steps]),
        first=first,
        generation=generation,
        life=life,
        parent=parent,
        rank=rank,
        run=run.id,
        step_seconds=(0.5,) * len(steps),
        steps=tuple(steps),
        unix_seconds=(1.8e9,) * len(steps),
    )
    await run.backend.put(str(segment.key), encode_segment(segment))
    return str(segment.key)
