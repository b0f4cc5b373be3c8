"""What a checkpointer shows of the training, and that it goes on being watched whatever becomes of the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.cli.daemon_call import call
from ckptd.errors import ConfigError, SaveSkipped, UsageError
from ckptd.wire.messages import GetStatus, Status
from ckptd_client import Checkpointer
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training

Open = Callable[..., Checkpointer]


def beat(daemon: Daemon, url: str) -> dict[str, Any] | None:
    sessions = call(daemon.socket, GetStatus(), Status, seconds=20).status["sessions"]["listed"]
    return next((session["beat"] for session in sessions if session["run"] == url), None)


def phase(daemon: Daemon, url: str) -> tuple[str, int]:
    found = beat(daemon, url)
    assert found is not None
    return found["phase"], found["step"]


def test_phases_are_seen_as_they_are_entered_and_left(open_ckpt: Open, daemon: Daemon, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1)
    assert phase(daemon, tmp_run) == ("start", 0)
    ckpt.restore()
    assert phase(daemon, tmp_run) == ("start", 0)
    training.step()
    ckpt.step(1, loss=0.25)  # and saves
    assert phase(daemon, tmp_run) == ("step", 1)
    with ckpt.phase("eval", limit_seconds=120.5):
        assert phase(daemon, tmp_run) == ("eval", 1)
        wait_until(lambda: (beat(daemon, tmp_run) or {})["limit_seconds"] == 120.5, "the limit", deadline_seconds=20)
    assert phase(daemon, tmp_run) == ("step", 1)
    with pytest.raises(ConfigError, match="no phase 'lunch'"):
        ckpt.phase("lunch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit_seconds"):
        ckpt.phase("eval", limit_seconds=0)
    ckpt.close()
    with pytest.raises(UsageError):
        ckpt.phase("eval")


def test_a_new_daemon_watches_the_same_life(own_daemon: Callable[..., Daemon], open_ckpt: Open, tmp_run: str) -> None:
    daemon = own_daemon()
    ckpt = open_ckpt(tmp_run, Training().state, socket=daemon.socket, start_daemon=False)
    ckpt.step(7)
    daemon.kill()
    daemon.start()
    wait_until(lambda: beat(daemon, tmp_run) is not None, "the page", deadline_seconds=30)
    assert phase(daemon, tmp_run) == ("step", 7)


def test_a_forked_child_that_leaves_a_phase_says_nothing(open_ckpt: Open, daemon: Daemon, tmp_run: str) -> None:
    ckpt = open_ckpt(tmp_run, Training().state)
    ckpt.step(3)
    entered = ckpt.phase("other")
    entered.__enter__()
    child = os.fork()
    if child == 0:
        entered.__exit__(None, None, None)  # as an error does that unwinds a data loader's worker
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert phase(daemon, tmp_run) == ("other", 3)
    entered.__exit__(None, None, None)
    assert phase(daemon, tmp_run) == ("step", 3)


def test_r153_a_save_that_waits_for_its_slot_is_a_phase(
    own_daemon: Callable[..., Daemon], open_ckpt: Open, tmp_run: str
) -> None:
    """Three times as long as a step may take."""
    daemon = own_daemon("--bandwidth", "0.05", "--hang-floor", "0.5", "--hang-first", "20")
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, socket=daemon.socket, slots=1, max_wait=1.5)
    for step in range(1, 31):
        ckpt.step(step)
    training.step()
    ckpt.save(31).wait("sealed", timeout=30)
    training.step()
    late = ckpt.save(32)
    assert late.state == "failed"
    watch = call(daemon.socket, GetStatus(), Status, seconds=20).status["watch"]
    assert watch["counts"] == {}
    with pytest.raises(SaveSkipped):
        ckpt.close()
