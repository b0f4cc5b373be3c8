"""One order of samples over all sources: what comes next, how far it goes, and what one rank takes of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckptd_client.data.head import Head
from ckptd_client.data.mixture import choices
from ckptd_client.data.position import OrderPosition, SourcePosition
from ckptd_client.data.seeds import mixed

Exhausted = Literal["stop", "repeat", "drop"]
"""What happens where a source ends: the order ends with the first one, the source begins again, or the others go on."""

Sample = tuple[int, Any]
"""Its place in the order, and what it is."""


class Order:
    """Walks over the sources. Positions are values: each call begins where it is told to."""

    def __init__(
        self, heads: Mapping[str, Head], weights: Mapping[str, float], *, seed: int, exhausted: Exhausted
    ) -> None:
        self._heads = dict(sorted(heads.items()))
        self._weights = weights
        self._seed = seed
        self._exhausted: Exhausted = exhausted

    def step(
        self, start: OrderPosition, batch_size: int, *, rank: int, world: int, drop_last: bool, mine: bool = True
    ) -> tuple[list[Sample], OrderPosition] | None:
        """The samples of a rank in the next step, and where the step ends for all ranks. ``None`` at the end.

        The last step takes what is left, at least a sample for each rank, or with ``drop_last`` only a whole step.
        What remains comes first after the end. ``mine=False`` passes over the step and gives no samples.
        """
        whole = batch_size * world
        wanted = range(batch_size * rank, batch_size * (rank + 1)) if mine else range(0)
        samples, end = self.advance(start, whole, wanted)
        if (left := end.place - start.place) == whole:
            return samples, end
        if left < world or drop_last:
            return None
        wanted = range(left * rank // world, left * (rank + 1) // world) if mine else range(0)
        return self.advance(start, left, wanted)

    def advance(self, start: OrderPosition, count: int, wanted: range) -> tuple[list[Sample], OrderPosition]:
        """Go up to ``count`` samples on, fewer only at the end; the samples of the places ``wanted`` among them."""
        at, samples, done = start, list[Sample](), 0
        while done < count:
            live = [name for name in self._heads if self._weights[name] and not self._at(at, name).out]
            if not live:
                break
            chosen = choices(
                [self._weights[name] for name in live], mixed(self._seed, "mixture"), at.place, count - done
            )
            own = range(wanted.start - done, wanted.stop - done)
            got, end, short = self._run(at, live, chosen, own)
            if short is None:
                return samples + got, end
            place, name = short
            if place:  # up to where the source ended, all is there
                got, at, _ = self._run(at, live, chosen[:place], own)
                samples, done = samples + got, done + place
            if self._exhausted == "stop":
                break
            at = replace(at, sources={**at.sources, name: replace(self._at(at, name), out=True)})
        return samples, at

    def _run(
        self, start: OrderPosition, live: Sequence[str], chosen: npt.NDArray[np.int64], own: range
    ) -> tuple[list[Sample], OrderPosition, tuple[int, str] | None]:
        """Samples of the places in ``own``, where it ends, and else the first place for which a source has none."""
        limit = None if self._exhausted == "repeat" else start.epoch
        heads = [self._heads[name] for name in live]
        for name, head in zip(live, heads, strict=True):
            head.go(self._at(start, name), limit)
        first, last = (min(max(end, 0), len(chosen)) for end in (own.start, own.stop))
        samples: list[Sample] = []
        if (short := self._skip(live, chosen, 0, first)) is None:
            for place in range(first, last):
                number = int(chosen[place])
                if (sample := heads[number].take()) is None:
                    short = (place, live[number])
                    break
                samples.append((start.place + place, sample))
            else:
                short = self._skip(live, chosen, max(first, last), len(chosen))
        moved = {name: head.position for name, head in zip(live, heads, strict=True)}
        return samples, OrderPosition(start.epoch, start.place + len(chosen), {**start.sources, **moved}), short

    def _skip(
        self, live: Sequence[str], chosen: npt.NDArray[np.int64], first: int, last: int
    ) -> tuple[int, str] | None:
        """Pass over the places; the first one for which a source has nothing left, and the source."""
        shorts: list[tuple[int, str]] = []
        counts = np.bincount(chosen[first:last], minlength=len(live)).tolist()
        for number, count in enumerate(counts):
            if (done := self._heads[live[number]].skip(count)) < count:
                places = np.flatnonzero(chosen[first:last] == number)
                shorts.append((first + int(places[done]), live[number]))
        return min(shorts, default=None)

    @staticmethod
    def _at(position: OrderPosition, name: str) -> SourcePosition:
        return position.sources.get(name, SourcePosition())
