"""What can be known of a hang: of every rank on this node its phase, last metrics, processes and stacks."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from ckptd.checkpoint.concurrency import in_thread
from ckptd.daemon.watch.decision import Action, Sample
from ckptd.daemon.watch.processes import ProcessSeen, by_py_spy, children_of, look_at, signal_if_caught
from ckptd.daemon.watch.watched import Watched
from ckptd.health.sightings import Sighting
from ckptd.limits import DUMP_SECONDS
from ckptd.pulse.page import Beat

BEATS_SHOWN = 20
QUIET_SECONDS = 0.15
"""After so long without a further byte, a dump is complete."""
LOOK_SECONDS = 0.03
FRAMES_COMPARED = 5
CHILDREN_SECONDS = 20.0
"""For the stacks of all processes below one trainer."""


class BeatSeen(msgspec.Struct, kw_only=True):
    """A beat in a report."""

    step: int
    phase: str
    unix_seconds: float
    loss: float | None
    grad_norm: float | None


class RankSeen(msgspec.Struct, kw_only=True):
    """One rank in a report."""

    rank: int
    generation: int
    step: int
    phase: str
    age_seconds: float
    limit_seconds: float
    stalled: bool
    suspect: bool = False
    """It is probably the one that the others wait for."""
    pid: int
    """0 where it lives in a namespace that cannot be seen."""
    beats: list[BeatSeen]
    stacks: str = ""
    """Of all its threads, written by itself; else by py-spy; empty where neither could be had."""
    note: str = ""
    """Why there is less than there could be."""
    process: ProcessSeen | None = None
    children: list[ProcessSeen] = []


class HangReport(msgspec.Struct, kw_only=True):
    """A hang, as a file for people and programs."""

    kind: str = "hang"
    message: str
    unix_seconds: float
    run: str
    launch: str
    alone: bool
    """Other ranks on this node went on."""
    ranks: list[RankSeen]
    machine: list[dict[str, Any]]
    """What was noticed about this machine in the :data:`ckptd.limits.HANG_SIGHTINGS_SECONDS` before."""


async def gather(
    action: Action, group: Sequence[tuple[Sample, Watched]], noticed: Sequence[Sighting], *, dump: bool
) -> HangReport:
    """All that can be known of the ranks of ``group``, some of which ``action`` is about. ``dump``: with stacks.
    ``noticed``: about the machine.

    Takes a few seconds at most, also where nobody answers.
    """
    stalled = {sample.life for sample in action.samples}
    ranks = list(await asyncio.gather(*(_of_rank(sample, watched, stalled, dump) for sample, watched in group)))
    ranks.sort(key=lambda seen: seen.rank)
    for seen in suspects(ranks):
        seen.suspect = True
    return HangReport(
        message=in_words(ranks, alone=action.alone),
        unix_seconds=time.time(),
        run=action.start.run,
        launch=action.start.launch,
        alone=action.alone,
        ranks=ranks,
        machine=[sighting.plain() for sighting in noticed],
    )


async def _of_rank(sample: Sample, watched: Watched, stalled: set[str], dump: bool) -> RankSeen:
    pid = watched.owner.process.pid
    seen = RankSeen(
        rank=sample.rank,
        generation=watched.generation,
        step=sample.step,
        phase=sample.phase.name.lower(),
        age_seconds=round(sample.age_seconds, 3),
        limit_seconds=round(sample.limit_seconds, 3),
        stalled=sample.life in stalled,
        pid=pid,
        beats=[_beat(beat) for beat in watched.recent(BEATS_SHOWN)],
    )
    if pid:
        seen.process = await in_thread(look_at, pid)
        seen.children = [await in_thread(look_at, child) for child in await in_thread(children_of, pid)]
    else:
        seen.note = "the process lives in another namespace: only what it tells itself is known"
    if dump:
        await _dump(seen, watched)
    return seen


def _beat(beat: Beat) -> BeatSeen:
    return BeatSeen(
        step=beat.step,
        phase=beat.phase.name.lower(),
        unix_seconds=round(beat.unix_seconds, 3),
        loss=beat.loss if math.isfinite(beat.loss) else None,
        grad_norm=beat.grad_norm if math.isfinite(beat.grad_norm) else None,
    )


# Stacks


async def _dump(seen: RankSeen, watched: Watched) -> None:
    watched.clear_stacks()
    start = watched.stacks_bytes
    if start < 0 or not watched.pull("dump"):
        seen.note = "it has handed in no place for its stacks, or is gone"
    else:
        seen.stacks = await _written(watched, start)
        if not seen.stacks:
            seen.note = f"it did not answer within {DUMP_SECONDS:g} s: it is stopped, or waits in the kernel"
    if not seen.stacks and seen.pid:
        seen.stacks = await by_py_spy(seen.pid)
    try:
        async with asyncio.timeout(CHILDREN_SECONDS):
            for child in seen.children:
                child.stacks = await _of_child(child.pid, watched)
    except TimeoutError:
        seen.note = seen.note or f"not all of its children answered within {CHILDREN_SECONDS:g} s"
    watched.clear_stacks()


async def _of_child(pid: int, watched: Watched) -> str:
    """One that was forked from the trainer dumps into the same place, one after the other."""
    start = watched.stacks_bytes
    if start >= 0 and watched.signal and signal_if_caught(pid, watched.signal):
        return await _written(watched, start) or await by_py_spy(pid)
    return await by_py_spy(pid)


async def _written(watched: Watched, start: int) -> str:
    """What has been written from ``start`` on, once no more comes."""
    until = time.monotonic() + DUMP_SECONDS
    size, changed_seconds = start, time.monotonic()
    while (now := time.monotonic()) < until and (size == start or now - changed_seconds < QUIET_SECONDS):
        await asyncio.sleep(LOOK_SECONDS)
        if (grown := watched.stacks_bytes) != size:
            size, changed_seconds = grown, time.monotonic()
    return watched.stacks(start) if size > start else ""


# Whose fault


def suspects(ranks: Sequence[RankSeen]) -> list[RankSeen]:
    """Of the stalled ranks, the one or few that the others probably wait for: those that are behind; else those that
    do not even run; else those whose main thread stands elsewhere than that of most. None where nothing tells."""
    stalled = [seen for seen in ranks if seen.stalled]
    if len(stalled) < 2:
        return stalled
    least = min(seen.step for seen in stalled)
    for odd in (
        [seen for seen in stalled if seen.step == least],
        [seen for seen in stalled if seen.process is not None and seen.process.state in ("stopped", "disk-sleep")],
        _elsewhere(stalled),
        [seen for seen in stalled if not seen.stacks],
    ):
        if 0 < len(odd) < len(stalled):
            return odd
    return []


def _elsewhere(ranks: Sequence[RankSeen]) -> list[RankSeen]:
    places = Counter(main_frames(seen.stacks) for seen in ranks if seen.stacks)
    if not places:
        return []
    usual, count = places.most_common(1)[0]
    if 2 * count <= len(ranks):
        return []
    return [seen for seen in ranks if seen.stacks and main_frames(seen.stacks) != usual]


def main_frames(stacks: str) -> tuple[str, ...]:
    """Where the main thread stands, innermost first. faulthandler writes it last."""
    threads = [block for block in stacks.split("\n\n") if "thread" in block.lower()]
    lines = threads[-1].splitlines()[1:] if threads else []
    return tuple(line.strip() for line in lines if line.startswith("  File"))[:FRAMES_COMPARED]


def in_words(ranks: Sequence[RankSeen], *, alone: bool) -> str:
    """One line for people."""
    stalled = [seen for seen in ranks if seen.stalled]
    named = ", ".join(
        f"rank {seen.rank} (step {seen.step}, {seen.phase}, {seen.age_seconds:.1f} s, limit {seen.limit_seconds:.1f} s)"
        for seen in stalled[:8]
    )
    more = f" and {len(stalled) - 8} more" if len(stalled) > 8 else ""
    others = "; other ranks go on" if alone else "; all ranks on this node" if len(stalled) == len(ranks) > 1 else ""
    suspect = [str(seen.rank) for seen in stalled if seen.suspect]
    blame = f"; behind: {', '.join(suspect)}" if suspect and len(stalled) > 1 else ""
    return f"no progress of {named}{more}{others}{blame}"
