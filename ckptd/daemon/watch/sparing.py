"""Alerts of what may come again and again: the first at once, and then no more than one in a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptd.daemon.owner import Owner
from ckptd.daemon.save import Failure
from ckptd.daemon.watch.alerts import Alert, Alerts
from ckptd.format.keys import Version
from ckptd.limits import ALERT_QUIET_SECONDS


@dataclass(slots=True)
class _Told:
    at_seconds: float
    kept_back: int = 0


class Sparing:
    """For failures, by run and stage; and for restarts, by run."""

    def __init__(
        self,
        alerts: Alerts,
        quiet_seconds: float = ALERT_QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``quiet_seconds``: between two alerts of one thing."""
        self._alerts = alerts
        self._quiet_seconds = quiet_seconds
        self._clock = clock
        self._told: dict[tuple[str, ...], _Told] = {}

    def failed(self, failure: Failure) -> None:
        """A save, or what is done with a checkpoint afterwards."""
        (run, rank), version = failure.seat, failure.version
        alert = Alert(
            kind="failed",
            level="error",
            message=f"step {version.step} of rank {rank} failed ({failure.stage}): {failure.error}",
            run=run,
            launch="",
            generation=version.generation,
            ranks=(rank,),
        )
        self._raise(("failed", run, failure.stage), alert)

    def restarted(self, owner: Owner, starts: int) -> None:
        """The trainers of a run were started again."""
        alert = Alert(
            kind="restarted",
            level="warning",
            message=f"start {starts} on this node: launch {owner.launch}, {owner.world} ranks",
            run=owner.seat.url,
            launch=owner.launch,
            generation=0,
            ranks=(),
        )
        self._raise(("restarted", owner.seat.url), alert)

    def doubted(self, run: str, launch: str, version: Version, reason: str) -> None:
        """A checkpoint is not restored any more where there is another one. Rare, so each is told."""
        alert = Alert(
            kind="doubted",
            level="error",
            message=f"{version} is marked suspect: {reason}",
            run=run,
            launch=launch,
            generation=version.generation,
            ranks=(),
        )
        self._alerts.raise_(alert)

    def _raise(self, thing: tuple[str, ...], alert: Alert) -> None:
        now = self._clock()
        told = self._told.get(thing)
        if told is not None and now - told.at_seconds < self._quiet_seconds:
            told.kept_back += 1
            return
        if told is not None and told.kept_back:
            alert = replace(alert, message=f"{alert.message}; {told.kept_back} more since the last alert of it")
        # What was quiet for long is new again.
        late = now - 2 * self._quiet_seconds
        self._told = {key: one for key, one in self._told.items() if one.at_seconds > late}
        self._told[thing] = _Told(now)
        self._alerts.raise_(alert)
