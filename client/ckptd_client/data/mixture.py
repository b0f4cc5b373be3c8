"""Which source the next samples come from: a pure function of the seed, the place and the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import numpy as np
import numpy.typing as npt

from ckptd.errors import UsageError

_STRIDE = 0x9E3779B97F4A7C15
"""The golden ratio as a fraction of 2**64: multiples of it spread more evenly than random draws."""


def checked_weights(names: Set[str], weights: Mapping[str, float] | None) -> dict[str, float]:
    """A weight for each name; all equal where none are given. Raises :class:`UsageError`."""
    if weights is None:
        return dict.fromkeys(sorted(names), 1.0)
    if weights.keys() != names:
        raise UsageError(f"weights are for {sorted(weights)}, and sources are {sorted(names)}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not sum(weights.values()) > 0:
        raise UsageError(f"weights {dict(weights)}: each must be finite and not negative, and one positive")
    return {name: float(weights[name]) for name in sorted(names)}


def choices(weights: list[float], seed: int, place: int, count: int) -> npt.NDArray[np.int64]:
    """For each of ``count`` samples from ``place`` on, the number of its source. Weights are above zero.

    Any run of samples is close to the weights: after n of them, a source is off by no more than the order of log n.
    """
    if len(weights) == 1:
        return np.zeros(count, np.int64)
    total, upto, bounds = math.fsum(weights), 0.0, list[int]()
    for weight in weights[:-1]:
        upto += weight
        bounds.append(min(int(upto / total * 2**64), 2**64 - 1))
    first = (place * _STRIDE + seed) % 2**64
    points = np.arange(count, dtype=np.uint64) * np.uint64(_STRIDE) + np.full(count, first, np.uint64)
    return np.searchsorted(np.array(bounds, np.uint64), points, side="right").astype(np.int64)
