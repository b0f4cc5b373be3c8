"""A daemon that is quick to suspect, and what it says."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.daemon_call import call
from ckptd.wire.messages import GetStatus, Status
from devtools.processes import wait_until
from tests.daemon.trainer import DEADLINE_SECONDS, DaemonProcess, daemon_at

FLOOR_SECONDS = 1.0
"""No step of a busy machine takes so long."""
FIRST_SECONDS = 30.0
QUICK = ("--hang-floor", str(FLOOR_SECONDS), "--hang-first", str(FIRST_SECONDS), "--hang-save", "4")
LOOK_SECONDS = 0.1


class Watching:
    """A daemon and what it has found."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.socket = daemon.socket

    def status(self) -> dict[str, Any]:
        """All of ``ckptd status --json``."""
        return call(self.socket, GetStatus(), Status, seconds=DEADLINE_SECONDS).status

    def watch(self) -> dict[str, Any]:
        return self.status()["watch"]

    def steps(self) -> list[int]:
        """How far each trainer is that is watched."""
        return [session["beat"]["step"] for session in self.status()["sessions"]["listed"] if session["beat"]]

    def alerts(self, kind: str) -> list[dict[str, Any]]:
        return [alert for alert in self.watch()["alerts"] if alert["kind"] == kind]

    def alert(self, kind: str, run: str = "") -> dict[str, Any]:
        """The first of a kind, of a run where one is given, once it is there."""

        def found() -> list[dict[str, Any]]:
            return [alert for alert in self.alerts(kind) if run in ("", alert["run"])]

        wait_until(lambda: bool(found()), f"an alert: {kind}", deadline_seconds=40, every_seconds=LOOK_SECONDS)
        return found()[0]

    def report(self, run: str = "") -> dict[str, Any]:
        """Of the first hang that is found."""
        return json.loads(Path(self.alert("hang", run)["report"]).read_text())

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Until the watchdog's status is so."""
        wait_until(lambda: condition(self.watch()), what, deadline_seconds=40, every_seconds=LOOK_SECONDS)


@pytest.fixture
def watching(private_folders: Path) -> Iterator[Callable[..., Watching]]:
    """Starts daemons that end with the test."""
    with ExitStack() as stack:

        def start(*options: str, socket: Path | None = None, **how: Any) -> Watching:
            path = socket or private_folders / uuid.uuid4().hex[:8] / "d.sock"
            return Watching(stack.enter_context(daemon_at(path, *QUICK, *options, **how)))

        yield start
