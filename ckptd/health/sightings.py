"""What was noticed about this machine during a run: one record for each thing, however often it is seen."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass
from typing import Any

from ckptd.limits import SIGHTINGS_MAX
from ckptd.storage import Finding

log = logging.getLogger(__name__)

HOST = "host"
"""The place of what concerns the whole machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A finding about a part of this machine, and when it was made."""

    place: str
    """:data:`HOST`, or a GPU by index and UUID."""
    finding: Finding
    """As it was seen last. Never of level ``ok``."""
    first_unix_seconds: float
    last_unix_seconds: float
    times: int

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        own = {name: getattr(self, name) for name in ("place", "first_unix_seconds", "last_unix_seconds", "times")}
        return {**asdict(self.finding), **own}


class Sightings:
    """The newest :data:`SIGHTINGS_MAX`. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[tuple[str, str], Sighting] = {}

    def note(self, place: str, finding: Finding, unix_seconds: float) -> None:
        """Keep a finding: a new one, or a further sighting of the same subject at the same place. What is new, or
        became worse or better, is logged."""
        key = (place, finding.subject)
        with self._lock:
            before = self._all.pop(key, None)
            self._all[key] = Sighting(
                place=place,
                finding=finding,
                first_unix_seconds=before.first_unix_seconds if before else unix_seconds,
                last_unix_seconds=unix_seconds,
                times=before.times + 1 if before else 1,
            )
            while len(self._all) > SIGHTINGS_MAX:
                del self._all[next(iter(self._all))]
        if before is None or before.finding.level != finding.level:
            number = logging.ERROR if finding.level == "error" else logging.WARNING
            log.log(number, "%s: %s: %s", place, finding.subject, finding.message)

    def latest(self, since_unix_seconds: float = 0.0) -> tuple[Sighting, ...]:
        """What was seen since then, the newest first."""
        with self._lock:
            found = [sighting for sighting in self._all.values() if sighting.last_unix_seconds >= since_unix_seconds]
        return tuple(reversed(found))
