"""What the launcher asks the daemon, which lives outside the workers and remembers them."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from ckptd.cli.daemon_call import call
from ckptd.errors import CkptdError, DaemonError
from ckptd.limits import CONNECT_SECONDS
from ckptd.wire.messages import Doubt, Doubted, GetLives, GetStatus, Lives, Status, TrainerLife
from ckptd_client.doorstep import connect, log_path, spawn_daemon

ANSWER_SECONDS = 10.0
MARK_SECONDS = 120.0
"""A store may take its time."""
POLL_SECONDS = 0.1

log = logging.getLogger("ckptd.run")


class Lookout:
    """At the daemon's socket."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def keep_daemon(self) -> None:
        """Start a daemon where none answers. Raises :class:`DaemonError` where it does not come up."""
        until = time.monotonic() + CONNECT_SECONDS
        started = False
        while True:
            try:
                connect(self.socket).close()
                return
            except (FileNotFoundError, ConnectionError) as error:
                if time.monotonic() > until:
                    raise DaemonError(
                        f"no daemon answers at {self.socket}: {error}", hint=f"see {log_path(self.socket)}"
                    ) from None
            if not started:
                spawn_daemon(self.socket)
                started = True
            time.sleep(POLL_SECONDS)

    def lives(self, launch: str) -> tuple[TrainerLife, ...] | None:
        """The trainers of a launch on this node; ``None`` where no daemon answers."""
        try:
            return call(self.socket, GetLives(launch=launch), Lives, seconds=ANSWER_SECONDS).lives
        except CkptdError as error:
            log.warning("the daemon cannot be asked: %s", error)
            return None

    def alerts(self, launch: str) -> list[str]:
        """What the daemon has told people of a launch lately; nothing where it cannot be asked."""
        with contextlib.suppress(CkptdError):
            watch = call(self.socket, GetStatus(), Status, seconds=ANSWER_SECONDS).status["watch"]
            return [str(alert["message"]) for alert in watch["alerts"] if alert["launch"] == launch]
        return []

    def doubt(self, launch: str, reason: str) -> str:
        """Mark suspect what a launch had restored. Its name; empty where it had restored nothing. Raises
        :class:`CkptdError`."""
        return call(self.socket, Doubt(launch=launch, reason=reason), Doubted, seconds=MARK_SECONDS).version

    def settle(self, deadline_seconds: float) -> tuple[bool, str]:
        """Wait until no save is under way. Whether that came, and what it means, in words."""
        if self._settles(deadline_seconds):
            return True, "all that was sealed is committed"
        return False, "the daemon still writes what was sealed: let it live"

    def _settles(self, deadline_seconds: float) -> bool:
        until = time.monotonic() + deadline_seconds
        while True:
            with contextlib.suppress(CkptdError):
                status = call(self.socket, GetStatus(), Status, seconds=ANSWER_SECONDS).status
                if not status["saves"]["count"]:
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_SECONDS)
