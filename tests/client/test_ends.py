"""Waiting for the ends of saves: one that failed does not hide how the others end."""

from __future__ import annotations

import threading

import pytest

from ckptd.errors import DeadlineExceeded, SaveSkipped
from ckptd.format.keys import Version
from ckptd_client.handles import Handles
from ckptd_client.save import Save


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
    assert handles.await_ends(30) is skipped
    assert newest.state == "committed"
    for timer in timers:
        timer.join()


def test_the_time_is_limited() -> None:
    handles = Handles(lambda: None)
    handles.add(Save(Version(1, 1), "asked"))
    with pytest.raises(DeadlineExceeded, match="step 1"):
        handles.await_ends(0.01)
