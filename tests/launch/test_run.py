"""Real trainings under ``ckptd run`` that die, and what comes after."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal

import psutil
import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.training_log import LoggedStep, read_log
from ckptd.errors import NeverStarted, TrainingStopped
from ckptd.format.keys import Version
from ckptd.storage import open_backend
from devtools.processes import wait_until
from tests.client.conftest import committed
from tests.launch.conftest import Launcher


def marks(url: str, version: Version) -> list[str]:
    async def read() -> list[str]:
        backend = open_backend(url, {})
        try:
            return [mark.mark for mark in await (await Run.open(backend)).marks(version)]
        finally:
            await backend.aclose()

    return asyncio.run(read())


def logged(url: str) -> list[LoggedStep]:
    async def read() -> list[LoggedStep]:
        async with contextlib.aclosing(open_backend(url, {})) as backend:
            return list(await read_log(await Run.open(backend)))

    return asyncio.run(read())


def test_r161_r162_a_restart_goes_on_from_the_newest_and_meets_nothing_of_the_last_start(launcher: Launcher) -> None:
    launcher.start("orphan")
    assert launcher.wait() == 0, launcher.output
    first, second = [line for line in launcher.told() if "restored" in line]
    assert (first["restored"], second["restored"]) == (0, 10)
    assert second["source"] == "memory"
    assert [line["child_lives"] for line in launcher.told() if "child_lives" in line] == [False, False]
    (failed,) = launcher.events("failed")
    assert "SIGKILL" in failed["text"]
    assert failed["last_step"] == 12
    (recovery,) = launcher.events("recovered")
    parts = [recovery[f"{part}_seconds"] for part in ("detect", "restart", "restore", "first_step")]
    assert all(part >= 0 for part in parts)
    assert recovery["restart_seconds"] > 0
    assert recovery["restore_seconds"] > 0
    assert sum(parts) == pytest.approx(recovery["seconds"])
    assert recovery["step"] == 11
    assert committed(launcher.url)[-1] == 15


def test_r156_a_checkpoint_from_which_it_fails_again_and_again_is_doubted(launcher: Launcher) -> None:
    launcher.start("bad", "--same-step-failures", "2", "--backoff", "0.1")
    assert launcher.wait() == 0, launcher.output
    assert [line["restored"] for line in launcher.told() if "restored" in line] == [0, 10, 5]
    assert [event["last_step"] for event in launcher.events("failed")] == [13, 13]
    assert {"suspect", "unhealthy"} <= set(marks(launcher.url, Version(10, 1)))
    assert not {"suspect", "unhealthy"} & set(marks(launcher.url, Version(5, 1)))


def test_a_loss_that_is_nan_is_gone_back_over_by_all_ranks(launcher: Launcher) -> None:
    launcher.start("nan", "--nproc-per-node", "2")
    assert launcher.wait() == 0, launcher.output
    for rank in (0, 1):
        assert [line["restored"] for line in launcher.told(rank) if "restored" in line] == [0, 10]
        assert launcher.told(rank)[-1] == {"step": 30}
    assert 30 in committed(launcher.url)  # the first life may have come further before it was ended
    assert [event["text"] for event in launcher.events("alert")] == [
        "the daemon tells: rank 0: at step 13 loss is nan",
        "the daemon tells: rank 0: pinned step 10-g1, the last good one from before step 13",
        "the daemon tells: rank 0: ended, to go back to step 10-g1",
    ]
    assert set(marks(launcher.url, Version(10, 1))) - {"verified"} == {"pinned"}
    rows = logged(launcher.url)
    first = [row for row in rows if row.generation == 1]
    assert [row.step for row in first if not row.rolled_back] == list(range(1, 11))
    assert [row.step for row in first if row.rolled_back] == list(range(11, first[-1].step + 1))
    assert math.isnan(first[12].values["loss"])
    second = [row for row in rows if row.generation == 2]
    assert [row.step for row in second] == list(range(11, 31))
    assert not any(row.rolled_back or math.isnan(row.values["loss"]) for row in second)


def test_r157_what_never_did_a_step_is_not_restarted(launcher: Launcher) -> None:
    launcher.start("typo")
    assert launcher.wait() == NeverStarted.exit_code, launcher.output
    assert len(launcher.events("started")) == 1
    assert "before the first step" in launcher.output


def test_r81_a_signal_to_one_rank_stops_all_after_the_same_saved_step(launcher: Launcher) -> None:
    launcher.start("stop", "--nproc-per-node", "2")
    launcher.await_step(3, ranks=2)
    (pid,) = [line["pid"] for line in launcher.told(1) if "pid" in line]
    os.kill(pid, signal.SIGTERM)
    assert launcher.wait() == TrainingStopped.exit_code, launcher.output
    assert launcher.told(0)[-1]["step"] == launcher.told(1)[-1]["step"]
    assert committed(launcher.url) == [launcher.told(0)[-1]["step"]]
    (stopped,) = launcher.events("stopped")
    assert stopped["safe"]
    assert launcher.events("failed") == []


@pytest.mark.long
def test_ranks_that_hang_and_are_ended_by_the_daemon_come_up_again(launcher_of_the_impatient: Launcher) -> None:
    """In a store of their own: in the one of the start before they would find where its ranks could be reached."""
    launcher = launcher_of_the_impatient
    launcher.start("hang", "--nproc-per-node", "2")
    assert launcher.wait() == 0, launcher.output
    assert len(launcher.events("started")) == 2
    (failed,) = launcher.events("failed")
    assert "SIGKILL" in failed["text"]
    for rank in (0, 1):
        assert [line["restored"] for line in launcher.told(rank) if "restored" in line] == [0, 35]
        assert launcher.told(rank)[-1] == {"step": 60}


@pytest.mark.long
def test_r161_workers_die_with_a_launcher_that_is_killed(launcher: Launcher) -> None:
    launcher.start("stop")
    launcher.await_step(1)
    (pid,) = [line["pid"] for line in launcher.told() if "pid" in line]
    launcher.end()
    wait_until(lambda: not psutil.pid_exists(pid), "the worker's end", deadline_seconds=20)
