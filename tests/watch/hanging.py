"""A trainer without torch that makes some steps and then hangs in one of many ways, in a process of its own:
``python -m tests.watch.hanging CONFIG``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ckptd.pulse import Phase, Pulse
from devtools.processes import kill_group, spawn
from tests.daemon.member import Member
from tests.daemon.trainer import Trainer, begin_run


class Hanging:
    """The process as a test sees it."""

    def __init__(
        self, socket_path: Path, member: Member, *, prefix: tuple[str, ...] = (), how: str = "", **options: Any
    ) -> None:
        """``how``: the function below in which it ends up; none: it goes on. ``prefix``: what starts it."""
        config = {"socket": str(socket_path), "member": asdict(member), "how": how, **options}
        argv = [*prefix, sys.executable, "-m", "tests.watch.hanging", msgspec.json.encode(config).decode()]
        self.process = spawn(argv, output=subprocess.PIPE)

    def wait_for(self, line: str = "hanging") -> Hanging:
        """Until it says so."""
        assert self.process.stdout is not None
        said: list[str] = []
        for got in self.process.stdout:
            said.append(got.decode().rstrip())
            if said[-1] == line:
                return self
        raise AssertionError("\n".join([f"the trainer ended before {line!r}:", *said[-20:]]))

    def __enter__(self) -> Hanging:
        return self

    def __exit__(self, *_: object) -> None:
        kill_group(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()


# Ways to hang


def hold_the_gil() -> None:
    """A call into C that keeps the interpreter's lock."""
    ctypes.PyDLL(None).sleep(600)


def spin_in_python() -> None:
    """Other threads live on and answer whoever asks them."""
    threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)], daemon=True).start()
    while True:
        pass


def receive_for_ever() -> None:
    """What never comes is waited for, in a system call without the lock."""
    mine, _theirs = socket.socketpair()
    mine.recv(1)


def wait_for_a_child() -> None:
    """The child, a fork as data loaders make them, is deadlocked on a lock that it inherited."""
    lock = threading.Lock()
    lock.acquire()
    child = os.fork()
    if child == 0:
        deadlocked_in_the_child(lock)
    os.waitpid(child, 0)


def deadlocked_in_the_child(lock: threading.Lock) -> None:
    """Nobody in this process holds it."""
    lock.acquire()


WAYS = {way.__name__: way for way in (hold_the_gil, spin_in_python, receive_for_ever, wait_for_a_child)}


def _save_for_long(session: Trainer, pulse: Pulse, seconds: float) -> None:
    """A copy that takes longer than any step, and is never sealed."""
    with pulse.phase(Phase.SAVE):
        session.make_arena()
        content = session.member.content(40)
        session.copy(session.begin(content), content, 0, 1000)
        time.sleep(seconds)
        print("in a save for long", flush=True)
        signal.pause()


# The process


@contextlib.contextmanager
def _session(config: Mapping[str, Any]) -> Iterator[tuple[Trainer, Pulse]]:
    member = Member(**config["member"])
    session = Trainer(Path(config["socket"]), member)
    try:
        if config.get("begin", True):
            begin_run(member)
        session.hello()
        yield session, session.watched()
    finally:
        session.close()


def _main(config: Mapping[str, Any]) -> None:
    if uid := config.get("uid"):
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    step_seconds = config.get("step_seconds", 0.02)
    with _session(config) as (session, pulse):
        pulse.opened(config["member"]["generation"])
        time.sleep(config.get("first_seconds", 0.0))
        for step in range(1, config.get("steps", 40) + 1):
            time.sleep(step_seconds)
            pulse.step(step, loss=1 / step, grad_norm=0.5)
            if step in config.get("evals", ()):
                with pulse.phase(Phase.EVAL):
                    time.sleep(config["eval_seconds"])
        print("hanging", flush=True)
        if config["how"] == "save_for_long":
            _save_for_long(session, pulse, config["save_seconds"])
        elif config["how"]:
            WAYS[config["how"]]()
        signal.pause()


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1]))
