"""What people are to hear of: one record, any number of ways to reach them."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckptd.errors import first_line
from ckptd.health.sightings import Sighting
from ckptd.limits import ALERTS_KEPT

log = logging.getLogger("ckptd.alerts")

Level = Literal["info", "warning", "error"]
AlertKind = Literal[
    "hang",
    "recovered",
    "ended",
    "not_ended",
    "straggler",
    "caught_up",
    "machine",
    "failed",
    "restarted",
    "doubted",
    "bad_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that has happened, for people and for programs."""

    kind: AlertKind
    level: Level
    message: str
    """In one line, for people. Without secrets."""
    run: str
    launch: str
    generation: int
    ranks: tuple[int, ...]
    report: str = ""
    """The file with all that is known, on the daemon's machine."""
    unix_seconds: float = field(default_factory=time.time)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "ranks": list(self.ranks)}


def about_machine(sighting: Sighting) -> Alert:
    """What concerns no run more than another."""
    found = sighting.finding
    return Alert(
        kind="machine",
        level="error" if found.level == "error" else "warning",
        message=f"{sighting.place}: {found.subject}: {found.message}",
        run="",
        launch="",
        generation=0,
        ranks=(),
        unix_seconds=sighting.first_unix_seconds,
    )


Sink = Callable[[Alert], None]
"""Called on the event loop: returns at once, and does what takes time in a task of its own."""


class Alerts:
    """Tells every sink. Add to :attr:`sinks` what is to be told."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = [_logged]
        self.recent: deque[Alert] = deque(maxlen=ALERTS_KEPT)
        self.counts: Counter[str] = Counter()

    def raise_(self, alert: Alert) -> None:
        """Never raises: a sink that fails is logged, and the others are told."""
        self.recent.append(alert)
        self.counts[alert.kind] += 1
        for sink in self.sinks:
            try:
                sink(alert)
            except Exception as error:
                log.error("an alert did not get through: %s", first_line(error))


def _logged(alert: Alert) -> None:
    """A line of fields that programs can read, and the message."""
    ranks = ",".join(map(str, alert.ranks))
    log.log(
        logging.getLevelNamesMapping()[alert.level.upper()],
        "alert=%s run=%s generation=%d ranks=%s report=%s: %s",
        alert.kind,
        alert.run,
        alert.generation,
        ranks,
        alert.report or "-",
        alert.message,
    )
