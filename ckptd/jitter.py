"""Waiting times at random, so that many processes do not come back together.

They come from a generator of our own: the global one of the process is the training's, which is to draw the same
numbers however often a request had to be repeated.
"""

from __future__ import annotations

import random

_numbers = random.Random()


def spread_seconds(seconds: float, least: float = 0.75, most: float = 1.25) -> float:
    """From ``least`` to ``most`` times as long."""
    return seconds * _numbers.uniform(least, most)


def jittered_seconds(longest_seconds: float) -> float:
    """Anything from 0 to this."""
    return _numbers.uniform(0.0, longest_seconds)


def backoff_seconds(number: int, first_seconds: float, longest_seconds: float) -> float:
    """Between attempt ``number``, counted from 1, and the next: a range that doubles with every attempt."""
    return jittered_seconds(min(first_seconds * 2.0 ** min(number - 1, 64), longest_seconds))
