"""Waiting for the ends of saves: one that failed does not hide how the others end."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.errors import DeadlineExceeded, SaveSkipped
from ckptd.format.keys import Version
from ckptd.wire.messages import Committed
from ckptd_client.handles import HANDLES_KEPT, Handles, await_ends
from ckptd_client.save import Save
from ckptd_client.saving import DUE, OnFull, Saving


def test_all_are_waited_for_where_one_has_failed() -> None:
    handles = Handles(lambda: None)
    skipped, newest = Save(Version(1, 1), "asked"), Save(Version(2, 1), "asked")
    for save in (skipped, newest):
        handles.add(save)
    timers = [
        threading.Timer(0.1, skipped.fail, [SaveSkipped("rank 1 takes no part")]),
        threading.Timer(0.4, newest.advance, ["committed"]),
    ]
    for timer in timers:
        timer.start()
    assert await_ends(handles.unfinished(), 30) is skipped
    assert newest.state == "committed"
    for timer in timers:
        timer.join()


def test_the_time_is_limited() -> None:
    handles = Handles(lambda: None)
    handles.add(Save(Version(1, 1), "asked"))
    with pytest.raises(DeadlineExceeded, match="step 1"):
        await_ends(handles.unfinished(), 0.01)


def test_what_is_in_flight_is_remembered_however_many_are_left_out_after_it() -> None:
    handles = Handles(lambda: None)
    in_flight = Save(Version(1, 1), "due")
    handles.add(in_flight)
    for step in range(2, 3 * HANDLES_KEPT):
        left_out = Save(Version(step, 1), "due")
        handles.add(left_out)
        left_out.fail(SaveSkipped("the store is behind"))
    assert handles.unfinished() == [in_flight]
    assert handles.get(Version(2, 1)) is None
    handles.on_event(Committed(step=1, generation=1, stats={}))
    assert in_flight.state == "committed"


class NoSlot:
    """Snapshots of a ring that is full: how long was waited for a slot."""

    idle = False

    def __init__(self) -> None:
        self.boundary = SimpleNamespace(crossed=lambda: self.at_boundary)
        self.at_boundary = False
        self.waits: list[float] = []

    def boundary_passed(self) -> None:
        pass

    def take(self, *_: Any, wait_seconds: float) -> None:
        self.waits.append(wait_seconds)
        raise DeadlineExceeded("no free slot")


@pytest.fixture
def full() -> NoSlot:
    return NoSlot()


def saving_of(full: NoSlot, world: int, on_full: OnFull) -> Saving:
    pulse = SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    link: Any = SimpleNamespace(pulse=pulse, tell=lambda _: None)
    snapshots: Any = full
    found = Saving(snapshots, Handles(lambda: None), link, 0, world, on_full=on_full, max_wait=7)
    life: Any = SimpleNamespace(generation=1, run="run")
    found.life = life
    return found


@pytest.fixture
def saving(full: NoSlot) -> Saving:
    return saving_of(full, 1, "skip")


@pytest.mark.parametrize("last", [False, True])
def test_a_save_put_off_to_the_last_step_waits_for_a_slot_too(saving: Saving, full: NoSlot, last: bool) -> None:
    save = saving.request(10, "", {})
    assert save.state == "deferred"
    full.at_boundary = True
    saving.stepped(11, last=last)
    assert full.waits == [7 if last else 0]


def test_a_pin_that_comes_too_late_is_told(saving: Saving, full: NoSlot, caplog: pytest.LogCaptureFixture) -> None:
    full.at_boundary = True
    first = saving.request(10, "due", {})
    assert saving.request(10, "", {}, pin=True, debug=False) is first
    assert "step 10 was asked for before without pin=True" in caplog.text


@pytest.mark.parametrize("on_full", ["wait", "skip", "fail"])
def test_who_waits_and_asks_for_a_save_is_not_left_out(full: NoSlot, on_full: OnFull) -> None:
    saving = saving_of(full, 2, on_full)
    full.at_boundary = True
    saving.request(1, DUE, {})
    tried = len(full.waits)
    for step in range(2, 4):
        saving.request(step, DUE, {})
    assert len(full.waits) < tried + 2, "some that are due are left out"
    tried = len(full.waits)
    for step in range(4, 20):
        saving.request(step, "the end", {})
    assert (len(full.waits) == tried + 16) == (on_full == "wait")
