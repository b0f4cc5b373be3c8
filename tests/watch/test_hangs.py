"""Real processes that hang, each in its own way, and what the daemon finds out and does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from ckptd.cli.daemon_commands import print_status
from tests.daemon.member import Member
from tests.watch.conftest import FIRST_SECONDS, FLOOR_SECONDS, Watching
from tests.watch.hanging import Hanging

Start = Callable[..., Watching]


def seen_of(report: dict[str, Any], rank: int) -> dict[str, Any]:
    return next(seen for seen in report["ranks"] if seen["rank"] == rank)


def test_r154_a_main_loop_that_is_stuck_is_found_and_its_stacks_are_had(watching: Start, tmp_run: str) -> None:
    watched = watching("--on-hang", "notify,dump,end", "--hang-grace", "0")
    with ExitStack() as stack:
        trainers = {
            how: stack.enter_context(Hanging(watched.socket, Member(f"{tmp_run}-{how}"), how=how))
            for how in ("hold_the_gil", "spin_in_python", "receive_for_ever")
        }
        for how, trainer in trainers.items():
            assert trainer.process.wait(40) == -signal.SIGKILL
            (seen,) = watched.report(f"{tmp_run}-{how}")["ranks"]
            assert (seen["step"], seen["phase"], seen["stalled"], seen["suspect"]) == (40, "step", True, True)
            assert seen["generation"] == 1
            assert seen["limit_seconds"] < 5
            assert how in seen["stacks"]
            assert seen["beats"][-1]["loss"] == 1 / 40
            assert seen["beats"][-1]["grad_norm"] == 0.5
    assert watched.watch()["counts"] == {"hangs": 3, "notify": 3, "dump": 3, "end": 3}
    assert len(watched.alerts("ended")) == 3


def test_a_deadlocked_child_shows_its_stacks_too(watching: Start, tmp_run: str) -> None:
    watched = watching()
    with Hanging(watched.socket, Member(tmp_run), how="wait_for_a_child").wait_for():
        (seen,) = watched.report()["ranks"]
        assert "wait_for_a_child" in seen["stacks"]
        (child,) = seen["children"]
        assert "deadlocked_in_the_child" in child["stacks"]
        assert child["state"] == "sleeping"


def test_a_stopped_rank_is_found_beside_one_that_goes_on_and_told_when_it_is_back(
    watching: Start, tmp_run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    watched = watching()
    with (
        Hanging(watched.socket, Member(tmp_run, rank=0, world=2), steps=100_000),
        Hanging(watched.socket, Member(tmp_run, rank=1, world=2), steps=100_000, step_seconds=0.06) as stopped,
    ):
        assert watched.alert("straggler")["ranks"] == [1]
        stopped.process.send_signal(signal.SIGSTOP)
        report = watched.report()
        assert (report["alone"], [seen["stalled"] for seen in report["ranks"]]) == (True, [False, True])
        seen = seen_of(report, 1)
        assert seen["suspect"]
        assert seen["process"]["state"] == "stopped"
        assert "rank 1" in report["message"]
        assert "_main" in seen_of(report, 0)["stacks"]  # of every rank, also of one that goes on
        assert watched.watch()["stalled"] == [f"rank 1 of {tmp_run}"]
        print_status(watched.status())
        shown = " ".join(capsys.readouterr().out.split())
        assert f"no progress: rank 1 of {tmp_run}" in shown
        assert "hang: no progress of rank 1" in shown
        assert "straggler: rank 1 lags" in shown
        assert f"hang limits of {tmp_run}: start 30.0 s, step" in shown
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
        assert watch["dry_run"]
        assert {alert["kind"] for alert in watch["alerts"]} <= {"machine"}, "of the machine it tells all the same"
        assert not (watched.socket.parent / "state" / "hangs").exists()


def test_limits_are_learned_and_outlive_the_daemon(watching: Start, tmp_run: str) -> None:
    def limit_seconds(daemon: Watching) -> float:
        return daemon.watch()["limits_seconds"].get(tmp_run, {}).get("step", FIRST_SECONDS)

    factor = ("--hang-factor", "40")
    watched = watching(*factor)
    with Hanging(watched.socket, Member(tmp_run), step_seconds=0.04, steps=30):
        watched.until(lambda _: limit_seconds(watched) < FIRST_SECONDS, "a learned limit")
    learned = limit_seconds(watched)
    assert learned >= 0.04 * 40
    assert watched.daemon.terminate() == 0
    again = watching(*factor, socket=watched.socket)
    # So few steps that nothing is learned from them.
    with Hanging(again.socket, Member(tmp_run, launch="again#0"), steps=3).wait_for():
        again.until(lambda watch: tmp_run in watch["limits_seconds"], "the run")
        assert learned <= limit_seconds(again) < FIRST_SECONDS


def test_r152_long_evaluations_and_a_long_first_step_are_no_hang_and_what_follows_is(
    watching: Start, tmp_run: str
) -> None:
    watched = watching("--hang-first", "4", "--hang-factor", "1.1")
    long = 2 * FLOOR_SECONDS
    waits = {"first_seconds": long, "evals": (60,), "eval_seconds": long}
    with Hanging(watched.socket, Member(tmp_run), how="receive_for_ever", steps=90, **waits).wait_for():
        (seen,) = watched.report()["ranks"]  # of the first hang
        assert (seen["step"], seen["phase"]) == (90, "step")
        assert seen["limit_seconds"] < long, "both would have been over the limit of a step"


def test_r151_r153_a_trainer_that_dies_in_a_long_save_leaves_no_suspicion_behind(watching: Start, tmp_run: str) -> None:
    watched = watching("--on-hang", "notify,dump,end", "--hang-grace", "0")
    with Hanging(watched.socket, Member(tmp_run), how="save_for_long", save_seconds=2 * FLOOR_SECONDS) as trainer:
        trainer.wait_for("in a save for long")
        assert watched.watch()["counts"] == {}
        trainer.process.kill()
        trainer.process.wait()
    with Hanging(watched.socket, Member(tmp_run, launch="again#0", generation=2), steps=100_000) as again:
        watched.until(lambda _: max(watched.steps(), default=0) >= 220, "more time than a save may take")
        assert watched.watch()["counts"] == {}
        assert again.process.poll() is None
