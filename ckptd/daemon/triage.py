"""What of the saves under way can still be made durable in the time that is left, by the bandwidth as measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptd.daemon.save import Save
from ckptd.format.keys import Version

SLACK = 1.5
"""What would take so many times as long as there is time is given up: bandwidth is never quite what it was."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What is left of one step of one run on this node."""

    version: Version
    left_bytes: int


def hopeless(pending: Sequence[Pending], bytes_per_second: float, seconds: float) -> list[Pending]:
    """What is to be given up so that the rest gets done: newest first, each that still fits beside those before it.
    Never all: where nothing fits, that of which least is left is tried. Nothing where no bandwidth is known."""
    if bytes_per_second <= 0:
        return []
    room = bytes_per_second * max(seconds, 0.0) * SLACK
    given_up: list[Pending] = []
    for one in sorted(pending, key=lambda one: (one.version.generation, one.version.step), reverse=True):
        if one.left_bytes <= room:
            room -= one.left_bytes
        else:
            given_up.append(one)
    if len(given_up) == len(pending) and pending:
        given_up.remove(min(given_up, key=lambda one: one.left_bytes))
    return given_up


def give_up(saves: Iterable[Save], seconds: float) -> dict[str, str]:
    """Cancel what there is no time for; it stays sealed in memory. What it was, and why, in words."""
    of_run: defaultdict[str, list[Save]] = defaultdict(list)
    for save in saves:
        if save.stage in ("queue", "write"):
            of_run[save.owner.seat.url].append(save)
    said: dict[str, str] = {}
    for url, found in of_run.items():
        rate = _rate(found)
        left: defaultdict[Version, int] = defaultdict(int)
        for save in found:
            left[save.version] += save.fill.record.shard_bytes - (save.source.sent_bytes if save.source else 0)
        for one in hopeless([Pending(version, size) for version, size in left.items()], rate, seconds):
            said[f"{one.version} of {url}"] = (
                f"{one.left_bytes / 1e6:.1f} MB left at {rate / 1e6:.1f} MB/s, and {max(seconds, 0):.0f} s"
            )
            for save in found:
                if save.version == one.version and save.task is not None:
                    save.task.cancel()
    return said


def _rate(saves: Sequence[Save]) -> float:
    """Bytes per second to a store, over all saves that are being written to it."""
    writing = [save for save in saves if save.source is not None and save.source.sent_bytes]
    if not writing:
        return 0.0
    seconds = time.monotonic() - min(save.source.began_seconds for save in writing if save.source)
    return sum(save.source.sent_bytes for save in writing if save.source) / max(seconds, 0.001)
