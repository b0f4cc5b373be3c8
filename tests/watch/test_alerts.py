"""Alerts reach every sink, whatever becomes of the others; and what an operator asks for is understood."""

from __future__ import annotations

import logging

import pytest
import typer

from ckptd.daemon.command import watch_rules
from ckptd.daemon.watch.alerts import Alert, Alerts
from ckptd.limits import ALERTS_KEPT


def alert(number: int = 0) -> Alert:
    return Alert(
        kind="hang",
        level="error",
        message=f"no progress {number}",
        run="file:///r",
        launch="l",
        generation=2,
        ranks=(1,),
    )


def test_a_sink_that_fails_keeps_the_alert_from_nobody(caplog: pytest.LogCaptureFixture) -> None:
    alerts, heard = Alerts(), list[Alert]()

    def fails(_: Alert) -> None:
        raise OSError("no network")

    alerts.sinks += [fails, heard.append]
    with caplog.at_level(logging.INFO):
        for number in range(ALERTS_KEPT + 1):
            alerts.raise_(alert(number))
    assert len(heard) == alerts.counts["hang"] == ALERTS_KEPT + 1
    assert len(alerts.recent) == ALERTS_KEPT
    assert "alert=hang run=file:///r generation=2 ranks=1 report=-: no progress 0" in caplog.text
    assert "no network" in caplog.text
    assert heard[0].plain()["ranks"] == [1]


def test_rungs_are_chosen_by_name() -> None:
    rules = watch_rules("dump, end", floor_seconds=3.0)
    assert (rules.notify, rules.dump, rules.end, rules.floor_seconds) == (False, True, True, 3.0)
    assert not watch_rules("nothing").active
    with pytest.raises(typer.BadParameter, match="bark"):
        watch_rules("notify,bark")
