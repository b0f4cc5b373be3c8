"""The pulse: what a trainer's page says of it, phase by phase, and the levers of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ckptd.errors import ConfigError, FormatError
from ckptd.pulse import Levers, Phase, Pulse
from ckptd.pulse.page import LIMIT_SECONDS_MAX, STATUS_BYTES, MappedPage, create_page
from ckptd.pulse.pulse import phase_named
from devtools.processes import wait_until


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    found = Pulse()
    yield found
    found.close()


def seen(pulse: Pulse) -> MappedPage:
    """Its page as the daemon maps it."""
    return MappedPage(dict(pulse.parts())["page"], writable=False)


def test_phases_are_entered_left_and_nested(pulse: Pulse) -> None:
    page = seen(pulse)
    pulse.opened(3)
    pulse.step(1, loss=0.5)
    with pulse.phase(Phase.EVAL, limit_seconds=7.5), pulse.phase(Phase.SAVE):
        pass
    pulse.step(2, grad_norm=2.0)
    beats = page.since(0)
    assert [(beat.phase, beat.step, beat.limit_seconds) for beat in beats] == [
        (Phase.START, 0, 0.0),
        (Phase.STEP, 1, 0.0),
        (Phase.EVAL, 1, 7.5),
        (Phase.SAVE, 1, 0.0),
        (Phase.EVAL, 1, 7.5),
        (Phase.STEP, 1, 0.0),
        (Phase.STEP, 2, 0.0),
    ]
    assert (beats[1].loss, beats[-1].grad_norm) == (0.5, 2.0)
    assert page.generation == 3
    pulse.close()
    last = page.last()
    assert last is not None
    assert last.phase is Phase.CLOSED
    page.close()


def test_r152_a_phase_whose_end_was_lost_ends_with_the_next_step(pulse: Pulse) -> None:
    page = seen(pulse)
    lost = pulse.phase(Phase.EVAL)
    lost.__enter__()
    pulse.step(5)
    with pulse.phase(Phase.COMPILE):
        lost.__exit__(None, None, None)  # late, and of no effect
        last = page.last()
        assert last is not None
        assert last.phase is Phase.COMPILE
    with pytest.raises(KeyError), pulse.phase(Phase.SAVE):
        raise KeyError
    last = page.last()
    assert last is not None
    assert (last.phase, last.step) == (Phase.STEP, 5)
    page.close()


def test_each_life_has_a_page_of_its_own(pulse: Pulse) -> None:
    other = Pulse()
    first, second = seen(pulse), seen(other)
    assert first.life != second.life
    assert len(first.life) == 32
    assert dict(pulse.parts())["dump"] == dict(other.parts())["dump"]  # the levers are the process's
    for page in (first, second):
        page.close()
    other.close()


@pytest.mark.parametrize(("name", "limit"), [("step", 1.0), ("lunch", 1.0), ("eval", 0), ("eval", -1), ("eval", 1e9)])
def test_phases_and_limits_that_are_none_are_refused(name: str, limit: float) -> None:
    with pytest.raises(ConfigError):
        phase_named(name, limit)
    assert phase_named("eval", None) == (Phase.EVAL, 0.0)
    assert phase_named("eval", LIMIT_SECONDS_MAX) == (Phase.EVAL, LIMIT_SECONDS_MAX)


def test_a_page_that_could_be_truncated_is_refused() -> None:
    short = os.memfd_create("short", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    os.ftruncate(short, STATUS_BYTES)
    for fd in (short, reading):
        with pytest.raises(FormatError, match="not a status page"):
            MappedPage(fd, writable=False)
    for fd in (short, reading, writing):
        os.close(fd)
    page = create_page()
    with pytest.raises(PermissionError):
        os.ftruncate(page, 0)
    os.close(page)


def test_a_pulled_lever_has_all_threads_dumped_and_nothing_else_happens() -> None:
    levers = Levers.acquire()
    stop = threading.Event()

    def waits_in_another_thread() -> None:
        stop.wait()

    thread = threading.Thread(target=waits_in_another_thread)
    thread.start()
    try:
        os.write(levers.dump, b"!")
        wait_until(lambda: os.fstat(levers.stacks).st_size > 0, "stacks", deadline_seconds=10)
        wait_until(
            lambda: b"test_a_pulled_lever" in os.pread(levers.stacks, 100_000, 0), "all of it", deadline_seconds=10
        )
        assert b"waits_in_another_thread" in os.pread(levers.stacks, 100_000, 0)
    finally:
        stop.set()
        thread.join()
        levers.release()


RELEASED = """
import os
from ckptd.pulse import Levers
first, second = Levers.acquire(), Levers.acquire()
assert first is second
kept = os.dup(first.dump), os.dup(first.end)
first.release()
os.write(kept[0], b"!")   # the second holder still takes it
second.release()
for lever in kept:
    try:
        os.write(lever, b"!")
    except BrokenPipeError:
        print("nobody there")
again = Levers.acquire()
print("alive", flush=True)
os.write(again.end, b"!")
while True: pass
"""


def test_levers_that_were_let_go_do_nothing_and_the_last_one_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["nobody there", "nobody there", "alive"], done.stderr
    assert done.returncode == -signal.SIGKILL


ALONE = """
import ctypes, gc, os, platform, struct
from ckptd.pulse import Phase, Pulse
write, leave = {"x86_64": (1, 231), "aarch64": (64, 94)}[platform.machine()]
pulse = Pulse()
def work():
    for step in range(1000):
        seconds = pulse.step(step, loss=1.5, grad_norm=0.5)
        pulse.log(step, {"loss": 1.5, "grad_norm": 0.5, "tokens": step}, unix_seconds=1.0, step_seconds=seconds)
        with pulse.phase(Phase.EVAL, 60.0):
            pass
work()
gc.disable()
# A filter of the kernel: load the system call's number; write and exit_group pass, any other ends the process.
steps = [(0x20, 0, 0, 0), (0x15, 2, 0, write), (0x15, 1, 0, leave), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert prctl(22, 2, program, 0, 0) == 0  # the filter
work()
os.write(1, b"not one system call")
os._exit(0)
"""


def test_a_beat_and_a_row_cost_no_system_call() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("not one system call", 0), done.stderr
