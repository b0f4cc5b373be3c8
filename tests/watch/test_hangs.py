"""Real processes that hang, each in its own way, and what the daemon finds out and does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from devtools.processes import wait_until
from tests.daemon.member import Member
from tests.watch.conftest import Watching
from tests.watch.hanging import Hanging

Start = Callable[..., Watching]


def seen_of(report: dict[str, Any], rank: int) -> dict[str, Any]:
    return next(seen for seen in report["ranks"] if seen["rank"] == rank)


@pytest.mark.parametrize("how", ["hold_the_gil", "spin_in_python", "receive_for_ever"])
def test_r154_a_main_loop_that_is_stuck_is_found_and_its_stacks_are_had(
    watching: Start, tmp_run: str, how: str
) -> None:
    watched = watching("--on-hang", "notify,dump,end", "--hang-grace", "0")
    with Hanging(watched.socket, Member(tmp_run), how=how).wait_for() as trainer:
        report = watched.report()
        (seen,) = report["ranks"]
        assert (seen["step"], seen["phase"], seen["stalled"], seen["suspect"]) == (40, "step", True, True)
        assert seen["generation"] == 1
        assert seen["limit_seconds"] < 5
        assert how in seen["stacks"]
        assert seen["beats"][-1]["loss"] == 1 / 40
        assert seen["beats"][-1]["grad_norm"] == 0.5
        assert trainer.process.wait(20) == -signal.SIGKILL
    assert watched.alert("ended")["ranks"] == [0]
    assert watched.watch()["counts"] == {"hangs": 1, "notify": 1, "dump": 1, "end": 1}


def test_a_deadlocked_child_shows_its_stacks_too(watching: Start, tmp_run: str) -> None:
    watched = watching()
    with Hanging(watched.socket, Member(tmp_run), how="wait_for_a_child").wait_for():
        (seen,) = watched.report()["ranks"]
        assert "wait_for_a_child" in seen["stacks"]
        (child,) = seen["children"]
        assert "deadlocked_in_the_child" in child["stacks"]
        assert child["state"] == "sleeping"


def test_a_stopped_rank_is_found_beside_one_that_goes_on_and_told_when_it_is_back(
    watching: Start, tmp_run: str
) -> None:
    watched = watching()
    with (
        Hanging(watched.socket, Member(tmp_run, rank=0, world=2), steps=100_000),
        Hanging(watched.socket, Member(tmp_run, rank=1, world=2), steps=100_000) as stopped,
    ):
        watched.until(lambda _: len(watched.status()["sessions"]["listed"]) == 2, "both")
        wait_until(
            lambda: all((s["beat"] or {}).get("step", 0) > 40 for s in watched.status()["sessions"]["listed"]),
            "learned limits",
            deadline_seconds=30,
        )
        stopped.process.send_signal(signal.SIGSTOP)
        report = watched.report()
        assert (report["alone"], [seen["stalled"] for seen in report["ranks"]]) == (True, [False, True])
        seen = seen_of(report, 1)
        assert seen["suspect"]
        assert seen["process"]["state"] == "stopped"
        assert "rank 1" in report["message"]
        assert "_main" in seen_of(report, 0)["stacks"]  # of every rank, also of one that goes on
        assert watched.watch()["stalled"] == [f"rank 1 of {tmp_run}"]
        stopped.process.send_signal(signal.SIGCONT)
        assert watched.alert("recovered")["ranks"] == [1]
        assert watched.watch()["stalled"] == []


def test_a_dry_run_only_counts(watching: Start, tmp_run: str) -> None:
    watched = watching("--on-hang", "notify,dump,end", "--hang-grace", "0", "--hang-dry-run")
    with Hanging(watched.socket, Member(tmp_run), how="receive_for_ever").wait_for() as trainer:
        watched.until(lambda watch: watch["counts"].get("end") == 1, "what would have been done")
        assert trainer.process.poll() is None
        watch = watched.watch()
        assert watch["counts"] == {"hangs": 1, "notify": 1, "dump": 1, "end": 1}
        assert (watch["dry_run"], watch["alerts"]) == (True, [])
        assert not (watched.socket.parent / "state" / "hangs").exists()


def test_limits_are_learned_and_outlive_the_daemon(watching: Start, tmp_run: str) -> None:
    watched = watching()
    with Hanging(watched.socket, Member(tmp_run), step_seconds=0.15, steps=30):
        watched.until(lambda watch: watch["limits_seconds"].get(tmp_run, {}).get("step", 30) < 5, "a learned limit")
    learned = watched.watch()["limits_seconds"][tmp_run]["step"]
    assert learned >= 0.15 * 5
    assert watched.daemon.terminate() == 0
    again = watching(socket=watched.socket)
    with Hanging(again.socket, Member(tmp_run, launch="again#0"), step_seconds=0.15, steps=8).wait_for():
        again.until(lambda watch: tmp_run in watch["limits_seconds"], "the run")
        assert again.watch()["limits_seconds"][tmp_run]["step"] == pytest.approx(learned, rel=0.5)
