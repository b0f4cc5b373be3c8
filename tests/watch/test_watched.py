"""The daemon's end of a page and its levers, also where what is handed in is not what it is said to be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.daemon.watch.evidence import RankSeen, main_frames, suspects
from ckptd.daemon.watch.processes import ProcessSeen
from ckptd.daemon.watch.rules import WARM_STEPS
from ckptd.daemon.watch.watched import Watched
from ckptd.errors import ProtocolError
from ckptd.pulse import Phase, Pulse
from ckptd.pulse.page import RING_BEATS


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    found = Pulse(logs=False)  # rows go another way
    yield found
    found.close()


@pytest.fixture
def watched(pulse: Pulse) -> Iterator[Watched]:
    found = Watched(cast(Any, SimpleNamespace()))
    for part, fd in pulse.parts():
        found.take(part, os.dup(fd), pulse.dump_signal)
    yield found
    found.close()


def test_steps_are_counted_without_what_is_done_between_them(pulse: Pulse, watched: Watched) -> None:
    assert watched.read(1.0) == []
    for step in range(1, WARM_STEPS + 3):
        with pulse.phase(Phase.SAVE):
            pass
        pulse.step(step)
    found = watched.read(2.0)
    assert [phase for phase, _ in found].count(Phase.STEP) == 2  # the first ones are not learned from
    assert [phase for phase, _ in found].count(Phase.SAVE) == WARM_STEPS + 2
    assert (watched.steps, watched.warm, len(watched.recent_steps)) == (WARM_STEPS + 2, True, 2)
    assert (watched.seen_seconds, watched.last and watched.last.step) == (2.0, WARM_STEPS + 2)
    assert watched.read(3.0) == []
    assert watched.seen_seconds == 2.0  # no progress since


def test_what_the_ring_has_lost_is_not_made_up(pulse: Pulse, watched: Watched) -> None:
    for step in range(1, 3 * RING_BEATS):
        pulse.step(step)
    found = watched.read(1.0)
    assert len(found) < RING_BEATS
    assert all(seconds < 1.0 for _, seconds in found)


@pytest.mark.parametrize("part", ["page", "stacks", "dump", "end"])
def test_what_is_not_what_it_is_said_to_be_is_refused_and_closed(watched: Watched, part: str) -> None:
    with tempfile.TemporaryFile() as file, pytest.raises(ProtocolError, match="handed in"):
        watched.take(part, fd := os.dup(file.fileno()), 0)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert watched.pull("dump")  # the good ones are still there


def test_a_life_that_is_over_has_no_levers(pulse: Pulse, watched: Watched) -> None:
    pulse.close()
    assert not watched.pull("dump")
    assert not watched.pull("end")
    watched.close()
    assert (watched.count, watched.stacks_bytes, watched.stacks(0)) == (-1, -1, "")


def seen(rank: int, *, step: int = 5, stalled: bool = True, where: str = "wait", state: str = "sleeping") -> RankSeen:
    idle = f'Thread 0x1 (most recent call first):\n  File "a.py", line {rank} in idle'
    stacks = f'{idle}\n\nCurrent thread 0x2:\n  File "t.py", line 1 in {where}\n'
    return RankSeen(
        rank=rank,
        generation=1,
        step=step,
        phase="step",
        age_seconds=9.0,
        limit_seconds=1.0,
        stalled=stalled,
        pid=0,
        beats=[],
        stacks=stacks if where else "",
        process=ProcessSeen(pid=0, state=state),
    )


def test_who_is_suspected() -> None:
    def of(*ranks: RankSeen) -> list[int]:
        return [found.rank for found in suspects(ranks)]

    assert main_frames(seen(3).stacks) == ('File "t.py", line 1 in wait',)
    assert of(seen(0), seen(1, step=4), seen(2)) == [1]  # behind
    assert of(seen(0), seen(1), seen(2, state="stopped")) == [2]
    assert of(seen(0, where="load"), seen(1), seen(2)) == [0]  # elsewhere than most
    assert of(seen(0), seen(1, where="")) == [1]  # does not answer
    assert of(seen(0), seen(1, stalled=False)) == [0]
    assert of(seen(0), seen(1)) == []  # nothing tells
