"""Real ranks that wait for each other, for their data, or for a restore that never ends; and what the daemon says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.daemon_call import call
from ckptd.wire.messages import GetStatus, Status
from devtools.processes import wait_until
from tests.client.conftest import Daemon
from tests.ranks.conftest import RankError, Ranks

STEPS = 30


def alerts(daemon: Daemon, kind: str) -> list[dict[str, Any]]:
    return [
        alert
        for alert in call(daemon.socket, GetStatus(), Status, seconds=20).status["watch"]["alerts"]
        if alert["kind"] == kind
    ]


def reports(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(Path(alert["report"]).read_text()) for alert in alerts(daemon, "hang")]


def report_where(daemon: Daemon, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first report of which this is true, once it is there."""
    wait_until(lambda: any(map(true, reports(daemon))), "the report", deadline_seconds=40, every_seconds=0.1)
    return next(filter(true, reports(daemon)))


def test_a_collective_that_one_rank_never_joins_is_a_report_with_the_stacks_of_all(
    ranks: Ranks, own_daemon: Callable[..., Daemon], tmp_path: Path, tmp_run: str
) -> None:
    daemon = own_daemon("--hang-floor", "1")
    ranks.group(2, tmp_path)
    ranks.open(tmp_run, 2, daemon.socket)
    ranks.each("steps", count=STEPS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].do, "meet")
        report = report_where(daemon, lambda report: [seen["stalled"] for seen in report["ranks"]] == [True, True])
        waits, absent = report["ranks"]
        assert "all_reduce" in waits["stacks"]
        assert "all_reduce" not in absent["stacks"]
        assert "main" in absent["stacks"]
        assert {seen["step"] for seen in report["ranks"]} == {STEPS}
        ranks[1].do("meet")  # late, not never: the training goes on as if nothing had been
        waiting.result(30)
    ranks.each("steps", count=1)
    wait_until(lambda: bool(alerts(daemon, "recovered")), "the good news", deadline_seconds=20)
    ranks.each("close")


def test_a_deadlocked_data_loader_shows_the_stacks_of_its_worker(
    ranks: Ranks, own_daemon: Callable[..., Daemon], tmp_run: str
) -> None:
    daemon = own_daemon("--hang-floor", "1")
    ranks.open(tmp_run, 1, daemon.socket)
    ranks.each("steps", count=STEPS)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(ranks[0].do, "load_from_a_deadlocked_worker")
        (seen,) = report_where(daemon, lambda report: bool(report["ranks"][0]["children"]))["ranks"]
        assert "load_from_a_deadlocked_worker" in seen["stacks"]
        (worker,) = [child for child in seen["children"] if "__getitem__" in child["stacks"]]
        os.kill(worker["pid"], signal.SIGKILL)
        with pytest.raises(RankError, match="exited unexpectedly"):
            loading.result(30)
    ranks.each("close")


def test_r155_no_collective_times_out_while_one_rank_cannot_save(
    ranks: Ranks, own_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemons = [own_daemon(), own_daemon()]
    near = f"file://{tmp_path}/near"
    ranks.group(2, tmp_path, timeout_seconds=4)
    ranks.open(near, 2, [daemon.socket for daemon in daemons], every_steps=2, max_wait=1)
    ranks.each("train_together", first=1, last=3)
    os.kill(daemons[0].pid, signal.SIGSTOP)
    try:
        # Longer in all than the limit of a collective; each save waits for its slot no longer than it may.
        first, second = ranks.each("train_together", first=4, last=24)
    finally:
        os.kill(daemons[0].pid, signal.SIGCONT)
    assert list(first["states"].values()).count("failed") >= 8
    assert first["states"].keys() == second["states"].keys()
    wait_until(lambda: not any(map(_saves, daemons)), "the daemons", deadline_seconds=20)
    ranks.each("train_together", first=25, last=26)
    ranks.each("close")  # the last save is committed


def test_r164_a_restore_that_never_ends_is_told_with_the_rank_that_is_late(
    ranks: Ranks, own_daemon: Callable[..., Daemon], tmp_path: Path, tmp_run: str
) -> None:
    daemon = own_daemon("--hang-first", "2")
    ranks.group(2, tmp_path)
    ranks.open(tmp_run, 2, daemon.socket)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ranks[1].do, "restore")
        wait_until(lambda: _phases(daemon)[1] == "restore", "the restore", deadline_seconds=20)
        ranks[1].signal(signal.SIGSTOP)
        try:
            waiting = pool.submit(ranks[0].do, "restore")
            report = report_where(daemon, lambda report: {s["phase"] for s in report["ranks"]} == {"restore"})
            waits, stopped = report["ranks"]
            assert (waits["suspect"], stopped["suspect"]) == (False, True)
            assert "_collect" in waits["stacks"]
            assert stopped["process"]["state"] == "stopped"
            assert "behind: 1" in report["message"]
        finally:
            ranks[1].signal(signal.SIGCONT)
        assert waiting.result(60)["step"] == late.result(60)["step"] == 0
    ranks.each("close")


def _saves(daemon: Daemon) -> int:
    return int(call(daemon.socket, GetStatus(), Status, seconds=20).status["saves"]["count"])


def _phases(daemon: Daemon) -> list[str]:
    sessions = call(daemon.socket, GetStatus(), Status, seconds=20).status["sessions"]["listed"]
    return [session["beat"]["phase"] for session in sessions]
