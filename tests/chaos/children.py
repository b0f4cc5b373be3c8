"""What the nursery forks, as the story sees it: told apart by pidfd, listened to, stopped, continued, killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from ckptd.errors import DeadlineExceeded
from devtools.processes import wait_until
from tests import nursery
from tests.chaos.points import Counter

GONE_SECONDS = 60.0
LOOK_SECONDS = 0.02
"""How often somebody looks whether what nobody tells has happened."""

Event = dict[str, Any]


class Child:
    """A trainer or a daemon."""

    def __init__(self, pid: int, events: int, counter: Counter, config: dict[str, Any]) -> None:
        self.pid = pid
        self.config = config
        self.counter = counter
        self.events: list[Event] = []
        self.stopped = False
        self._pipe = events
        self._rest = b""
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None
        self.heard_all = False

    def fileno(self) -> int:
        return self._pipe

    @property
    def alive(self) -> bool:
        if self._pidfd is None:
            return False
        return not select.select([self._pidfd], [], [], 0)[0]

    def signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
                self.stopped = self.stopped or number == signal.SIGSTOP

    def go_on(self) -> None:
        """Where it stands still, or is about to as it has said so; unless it went on already, let off from that stop
        together with another one."""
        if self.stopped:
            wait_until(
                lambda: self.stands_still() or self._went_on(),
                f"process {self.pid} to stand still",
                deadline_seconds=GONE_SECONDS,
            )
            self.stopped = False
            self.signal(signal.SIGCONT)

    def _went_on(self) -> bool:
        """From each point at which it said that it stands still."""
        return self.counter.resumed == sum(event["event"] == "at" for event in self.events) > 0

    def stands_still(self) -> bool:
        """By the kernel's word, or it has ended."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
        return True

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        if self._pidfd is not None and not select.select([self._pidfd], [], [], GONE_SECONDS)[0]:
            raise DeadlineExceeded(f"process {self.pid} does not end")

    def read(self) -> list[Event]:
        """What it has told since; there must be something to read, or its end."""
        data = os.read(self._pipe, 1 << 16)
        if not data:
            self.heard_all = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        fresh: list[Event] = [json.loads(line) for line in lines]
        self.events += fresh
        self.stopped = self.stopped or any(event["event"] == "at" for event in fresh)
        return fresh

    def last(self, name: str) -> Event | None:
        """The newest event of that name."""
        return next((event for event in reversed(self.events) if event["event"] == name), None)

    def close(self) -> None:
        self.kill()
        os.close(self._pipe)
        self.counter.close()
        if self._pidfd is not None:
            os.close(self._pidfd)


class Nursery(nursery.Nursery):
    """What forks them."""

    def __init__(self) -> None:
        super().__init__("tests.chaos.nursery")

    def child(self, config: dict[str, Any]) -> Child:
        """A child that lives as configured."""
        events, theirs = os.pipe()
        counter = Counter()
        counter.stop_at(config.get("stop_at", 0))
        pid = self.fork(config, theirs, counter.descriptor)
        os.close(theirs)
        return Child(pid, events, counter, config)


def listen(
    children: Sequence[Child], until: Callable[[], bool], deadline_seconds: float, heard: Callable[[Child, Event], None]
) -> bool:
    """Take in events until the condition holds: whether it did in time. Each event goes to ``heard``; what was told
    already is taken in at least."""
    deadline = time.monotonic() + deadline_seconds
    while not until():
        left = deadline - time.monotonic()
        speaking = [child for child in children if not child.heard_all]
        for child in select.select(speaking, [], [], min(max(left, 0), LOOK_SECONDS))[0]:
            for event in child.read():
                heard(child, event)
        if left <= 0:
            return until()
    return True


def daemons_at(socket_path: Path) -> list[psutil.Process]:
    """Daemons that trainers have started at this socket, and that live."""
    found: list[psutil.Process] = []
    wanted = os.fsencode(socket_path)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, psutil.Error):
            if wanted in command.read_bytes().split(b"\0"):  # a zombie has none
                found.append(psutil.Process(int(command.parent.name)))
    return found
