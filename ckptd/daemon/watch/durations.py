"""How long something takes, learned from a run: a histogram that stays small, forgets slowly, and can be stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

BINS_PER_DOUBLING = 4
"""So a quantile is at most 19 % too long, and never too short."""
REMEMBERED = 4096
"""With more than so many, all counts are halved: what has changed for good is believed after some thousand steps."""
_LOWEST, _HIGHEST = -60, 120  # 30 microseconds to 34 years: what a page may claim, in bounded memory


class Durations:
    """Of one phase of one run."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        """``counts``: as :meth:`stored` gave them. What is no such thing is left out."""
        self._counts: Counter[int] = Counter()
        for name, count in (counts or {}).items():
            if name.lstrip("-").isdigit() and _LOWEST <= int(name) <= _HIGHEST and count > 0:
                self._counts[int(name)] = min(count, REMEMBERED)

    def stored(self) -> dict[str, int]:
        """Bin → count, as JSON can hold it."""
        return {str(bin_): count for bin_, count in sorted(self._counts.items())}

    @property
    def count(self) -> int:
        return self._counts.total()

    def add(self, seconds: float) -> None:
        """One more. What is no duration is left out."""
        if not 0 <= seconds < math.inf:
            return
        bin_ = math.ceil(math.log2(seconds) * BINS_PER_DOUBLING) if seconds > 0 else _LOWEST
        self._counts[min(max(bin_, _LOWEST), _HIGHEST)] += 1
        if self._counts.total() > REMEMBERED:
            self._counts = Counter({bin_: half for bin_, count in self._counts.items() if (half := (count + 1) // 2)})

    def quantile_seconds(self, fraction: float) -> float:
        """At most this long were so many of them; 0 where none is known."""
        wanted = fraction * self._counts.total()
        passed = 0
        for bin_, count in sorted(self._counts.items()):
            passed += count
            if passed >= wanted:
                return math.exp2(bin_ / BINS_PER_DOUBLING)
        return 0.0
