"""What a checkpointer shows of the training, and that it goes on being watched whatever becomes of the daemon."""

from __future__ import annotations

import os
import subprocess
import sys
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
    """Twice as long as a step may take."""
    daemon = own_daemon("--bandwidth", "0.05", "--hang-floor", "1", "--hang-first", "20")
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, socket=daemon.socket, slots=1, max_wait=2.0)
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


QUIET = """
import ctypes, gc, os, platform, struct, sys
import torch
from ckptd_client import Checkpointer
futex, write, leave = {"x86_64": (202, 1, 231), "aarch64": (98, 64, 94)}[platform.machine()]
model = torch.nn.Linear(4, 4)
state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
ckpt = Checkpointer(sys.argv[1], state, every_steps=10**6, socket=sys.argv[2], start_daemon=False)
ckpt.restore()
def work(first):
    for step in range(first, first + 1000):
        ckpt.step(step, loss=1.5, grad_norm=0.5, tokens=step)
work(1)
gc.disable()
# A filter of the kernel, for this thread: load the system call's number; what the interpreter's own lock needs, write
# and exit_group pass, any other ends the process.
numbers = [futex, write, leave]
steps = [(0x20, 0, 0, 0), *((0x15, 3 - at, 0, number) for at, number in enumerate(numbers))]
steps += [(0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert prctl(22, 2, program, 0, 0) == 0  # the filter
work(1001)
os.write(1, b"not one system call")
os._exit(0)
"""


def test_a_step_without_a_save_costs_no_system_call(daemon: Daemon, tmp_run: str) -> None:
    argv = [sys.executable, "-c", QUIET, tmp_run, str(daemon.socket)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("not one system call", 0), done.stderr
