"""Looks at this machine at an interval, in a thread of its own: a driver or disk that hangs holds up nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ckptd.errors import first_line
from ckptd.health.gpu import Gpus, open_gpus
from ckptd.health.host import Host
from ckptd.health.sightings import HOST, Sighting, Sightings
from ckptd.storage import Finding

log = logging.getLogger(__name__)

STUCK_SECONDS = 60.0
"""A look that takes longer is a finding itself."""
STOPPED_SECONDS = 2.0
"""A thread that wakes up so much too late was stopped, with its process or machine."""
CLOSE_SECONDS = 1.0


class Monitor:
    """One for a daemon. All but :meth:`look` may be called from any thread, and does not block."""

    def __init__(
        self,
        every_seconds: float,
        *,
        host: Host | None = None,
        open_gpus: Callable[[], Gpus | None] = open_gpus,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``every_seconds`` 0: never look. ``open_gpus`` is called in the thread, once."""
        self.every_seconds = every_seconds
        self._host = host or Host()
        self._open_gpus = open_gpus
        self._monotonic = monotonic
        self._gpus: Gpus | None = None
        self._opened = False
        self._sightings = Sightings()
        self._looking: tuple[str, float] | None = None
        """At what, since when."""
        self._looked_seconds: float | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        if self.every_seconds:
            self._thread = threading.Thread(target=self._run, name="health", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End; a look that hangs is left behind, and ends with the process."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def watch(self, folders: Iterable[Path]) -> None:
        """Whose disks are looked at, from now on."""
        self._host.folders = frozenset(folders)

    def latest(self, since_unix_seconds: float = 0.0) -> tuple[Sighting, ...]:
        """What was noticed since then, the newest first; a look that hangs right now is the first of them."""
        found = self._sightings.latest(since_unix_seconds)
        stuck = self._stuck()
        return found if stuck is None else (stuck, *found)

    def _stuck(self) -> Sighting | None:
        looking = self._looking
        if looking is None or (seconds := self._monotonic() - looking[1]) < STUCK_SECONDS:
            return None
        now = time.time()
        finding = Finding("error", "stuck", f"looking at {looking[0]} has not ended for {seconds:.0f} s")
        return Sighting(place=HOST, finding=finding, first_unix_seconds=now - seconds, last_unix_seconds=now, times=1)

    def status(self, listed: int) -> dict[str, Any]:
        """For ``ckptd status``: the newest ``listed`` sightings, and figures of as many GPUs."""
        found, gpus = self.latest(), self._gpus
        looked = self._looked_seconds
        return {
            "every_seconds": self.every_seconds,
            "age_seconds": None if looked is None else round(self._monotonic() - looked, 3),
            "host": dict(self._host.figures),
            "gpus": [{"place": gpu.place, **gpu.figures} for gpu in (gpus.all if gpus else ())][:listed],
            "findings": {"count": len(found), "listed": [sighting.plain() for sighting in found[:listed]]},
        }

    def _run(self) -> None:
        until = 0.0
        while not self._end.is_set():
            if until and (late := self._monotonic() - until) > STOPPED_SECONDS:
                text = f"this process, or the machine, stood still for {late:.0f} s"
                self._note(HOST, Finding("warning", "stood still", text))
            try:
                self.look()
            except Exception as error:  # the next look may go well
                log.error("looking at this machine: %s", first_line(error))
            until = self._monotonic() + self.every_seconds
            self._end.wait(self.every_seconds)
        if self._gpus is not None:
            self._gpus.close()

    def look(self) -> None:
        """Once, at everything. For one thread at a time; may block."""
        try:
            self._look_at("the host and its disks")
            for finding in self._host.look():
                self._note(HOST, finding)
            self._look_at("the GPUs")
            for place, finding in self._gpu_findings():
                self._note(place, finding)
        finally:
            self._looking = None
        self._looked_seconds = self._monotonic()

    def _look_at(self, what: str) -> None:
        self._looking = (what, self._monotonic())

    def _gpu_findings(self) -> Iterable[tuple[str, Finding]]:
        if not self._opened:
            self._opened = True
            try:
                self._gpus = self._open_gpus()
            except ImportError:
                hint = "pip install 'ckptd[gpu]' for the daemon"
                return [(HOST, Finding("warning", "GPUs", "they are not watched: nvidia-ml-py is missing", hint))]
        return self._gpus.look() if self._gpus is not None else ()

    def _note(self, place: str, finding: Finding) -> None:
        self._sightings.note(place, finding, time.time())
