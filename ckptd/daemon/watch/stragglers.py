"""Which rank lags the others by the time that its steps take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median

STEPS_MIN = 16
"""Steps of a rank that must be known before it is compared."""
DIFFERENCE_SECONDS_MIN = 0.01
"""Less is the noise of the machine."""


def lagging(
    step_seconds: Mapping[int, Collection[float]], ratio: float, lagged: Collection[int] = ()
) -> dict[int, float]:
    """Rank → how many times as long as the others' its steps take, for those where that is ``ratio`` or more; for those
    that ``lagged`` before, half of the excess is enough. ``step_seconds``: of each rank's last steps."""
    medians = {rank: median(seconds) for rank, seconds in step_seconds.items() if len(seconds) >= STEPS_MIN}
    found: dict[int, float] = {}
    for rank, own in medians.items():
        others = [seconds for other, seconds in medians.items() if other != rank]
        if not others or own - (usual := median(others)) < DIFFERENCE_SECONDS_MIN:
            continue
        times = own / usual if usual > 0 else float("inf")
        if times >= (1 + (ratio - 1) / 2 if rank in lagged else ratio):
            found[rank] = times
    return found
