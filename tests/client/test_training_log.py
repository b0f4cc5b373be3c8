"""What a training reports is there after any kill, and what is bad about it is acted upon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.standing import Standing
from ckptd.checkpoint.training_log import TrainingLog, read_log
from ckptd.cli.daemon_call import call
from ckptd.errors import ConfigError, UsageError
from ckptd.format.keys import Version
from ckptd.limits import LATE_ROWS_MAX, LOG_COLUMNS_MAX
from ckptd.pulse import Pulse
from ckptd.pulse.rows import MappedRows
from ckptd.storage import open_backend
from ckptd.wire.messages import GetStatus, Status
from ckptd_client import Checkpointer, LossRules
from ckptd_client.progress import FromGpu, Progress, figures
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.client.conftest import Daemon, Training, committed
from tests.client.processes import TrainingProcess

Open = Callable[..., Checkpointer]
Start = Callable[..., Daemon]


def logged(url: str, options: dict[str, Any] | None = None, rank: int = 0) -> TrainingLog:
    async def read() -> TrainingLog:
        async with contextlib.aclosing(open_backend(url, options)) as backend:
            return await read_log(await Run.open(backend), rank=rank)

    return asyncio.run(read())


def standings(url: str) -> dict[Version, Standing]:
    async def read() -> dict[Version, Standing]:
        async with contextlib.aclosing(open_backend(url)) as backend:
            return await (await Run.open(backend)).standings()

    return asyncio.run(read())


def wait_for_rows(url: str, count: int, options: dict[str, Any] | None = None) -> TrainingLog:
    wait_until(lambda: len(logged(url, options)) >= count, f"{count} rows", deadline_seconds=40, every_seconds=0.2)
    return logged(url, options)


def alerts(daemon: Daemon, url: str) -> list[str]:
    watch = call(daemon.socket, GetStatus(), Status, seconds=20).status["watch"]
    return [alert["message"] for alert in watch["alerts"] if (alert["kind"], alert["run"]) == ("bad_loss", url)]


def test_every_step_of_a_killed_training_is_there_and_what_was_gone_back_over_is_marked(
    own_daemon: Start, tmp_run: str
) -> None:
    daemon = own_daemon()
    losses: dict[int, float] = {}
    with TrainingProcess(daemon.socket, tmp_run, steps=100, every_steps=5, die_at=13, wait="sealed") as first:
        for step in range(1, 13):
            losses[step] = float.fromhex(first.until("step", step=step)["loss"])
        assert first.end() == -signal.SIGKILL
    found = wait_for_rows(tmp_run, 13)
    assert [row.step for row in found] == list(range(1, 14))
    assert {row.step: row.values["loss"] for row in found if row.step < 13} == losses
    assert not any(row.rolled_back for row in found)
    with TrainingProcess(daemon.socket, tmp_run, steps=14, every_steps=5) as second:
        assert second.until("restored")["step"] == 10
        second.until("end")
    found = wait_for_rows(tmp_run, 13 + 4)
    assert [(row.generation, row.step) for row in found if row.rolled_back] == [(1, 11), (1, 12), (1, 13)]
    kept = [row.values["loss"] for row in found if not row.rolled_back]
    assert kept[:12] == [losses[step] for step in range(1, 13)]  # the second life has done the very same


def test_a_training_that_dies_before_its_first_save_has_a_log_without_a_restore_too(
    own_daemon: Start, open_ckpt: Open, tmp_run: str
) -> None:
    daemon = own_daemon()
    with TrainingProcess(daemon.socket, tmp_run, steps=100, every_steps=50, die_at=7, restore=False) as first:
        assert first.end() == -signal.SIGKILL
    found = wait_for_rows(tmp_run, 7)
    assert [(row.generation, row.step, row.rolled_back) for row in found] == [(1, step, False) for step in range(1, 8)]
    with TrainingProcess(daemon.socket, tmp_run, steps=3, every_steps=2, restore=False) as second:
        second.until("end")
    found = wait_for_rows(tmp_run, 7 + 3)
    assert [(row.generation, row.rolled_back) for row in found] == [(1, True)] * 7 + [(2, False)] * 3
    third = open_ckpt(tmp_run, Training().state, socket=daemon.socket)
    with pytest.raises(UsageError, match=r"already holds checkpoints.*restore\(step=0\)"):
        third.step(1, loss=1.0)
    assert third.restore(step=0).generation == 3
    third.step(1, loss=1.0)
    with pytest.raises(UsageError, match="before the first step or save"):
        third.restore()


def test_what_was_stored_survives_trainer_and_daemon(own_daemon: Start, s3_server: S3Endpoint) -> None:
    """On S3, which cannot append."""
    daemon, url = own_daemon("--log-write", "0.2"), s3_server.prefix()
    options = {"storage_options": s3_server.options}
    with TrainingProcess(
        daemon.socket, url, steps=10_000, every_steps=10_000, pause_seconds=0.02, options=options
    ) as first:
        first.until("restored")
        stored = len(wait_for_rows(url, 30, s3_server.options))
        first.kill()
        daemon.kill()
    found = logged(url, s3_server.options)
    assert [row.step for row in found] == list(range(1, len(found) + 1))
    assert len(found) >= stored
    assert (found.notes, dict(found.missing)) == ((), {})


@pytest.mark.long
def test_a_restarted_daemon_loses_nothing_of_a_living_trainer(own_daemon: Start, open_ckpt: Open, tmp_run: str) -> None:
    daemon = own_daemon("--log-write", "3600")
    ckpt = open_ckpt(tmp_run, Training().state, socket=daemon.socket, start_daemon=False)
    ckpt.restore()
    for step in range(1, 6):
        ckpt.step(step, loss=step)
    daemon.kill()
    for step in range(6, 11):
        ckpt.step(step, loss=step)
    daemon.start()

    def taken() -> bool:
        lives = call(daemon.socket, GetStatus(), Status, seconds=20).status["logs"]["listed"]
        return [life["rows"] for life in lives if life["run"] == tmp_run] == [10]

    wait_until(taken, "the rows", deadline_seconds=40, every_seconds=0.2)
    ckpt.close()
    assert [row.values for row in wait_for_rows(tmp_run, 10)] == [{"loss": float(step)} for step in range(1, 11)]


@pytest.mark.parametrize("how", ["one tier", pytest.param("two tiers", marks=pytest.mark.long)])
def test_a_bad_loss_goes_back_to_the_last_good_checkpoint(own_daemon: Start, tmp_run: str, how: str) -> None:
    daemon = own_daemon()
    url: Any = tmp_run if how == "one tier" else [tmp_run, f"{tmp_run}-far"]
    training: dict[str, Any] = {"steps": 10_000, "every_steps": 2, "pause_seconds": 0.05, "wait": "committed"}
    options = {"on_bad_loss": "go_back"}
    with TrainingProcess(daemon.socket, url, bad_from=8, options=options, **training) as first:
        first.until("saved", step=8)  # a nan has got into that
        assert first.end() == -signal.SIGKILL
    wait_until(
        lambda: all(
            standings(tmp_run).get(Version(step, 1), Standing()).unhealthy for step in committed(tmp_run) if step > 7
        ),
        "marks on all later ones",
        deadline_seconds=40,
    )
    assert standings(tmp_run)[Version(6, 1)] == Standing(pinned=True)
    assert not any(standing.unhealthy for version, standing in standings(tmp_run).items() if version.step < 8)
    told = alerts(daemon, tmp_run)
    assert told[0] == "rank 0: at step 8 loss is nan"
    assert told[1:] == [
        "rank 0: pinned step 6-g1, the last good one from before step 8",
        "rank 0: ended, to go back to step 6-g1",
    ]
    with TrainingProcess(daemon.socket, url, options=options, **(training | {"steps": 9})) as second:
        restored = second.until("restored")
        assert restored["step"] == 6
        assert any("unhealthy" in notice for notice in restored["notices"])
        second.until("end")
    wait_until(
        lambda: [row.step for row in logged(tmp_run) if row.generation == 2] == [7, 8, 9],
        "the second life's log",
        deadline_seconds=40,
        every_seconds=0.2,
    )
    found = [row for row in logged(tmp_run) if row.generation == 1]
    assert [row.step for row in found if not row.rolled_back] == [1, 2, 3, 4, 5, 6]
    assert len(found) > 6


def test_a_bad_loss_is_told_and_pinned_and_the_training_goes_on(
    own_daemon: Start, open_ckpt: Open, tmp_run: str
) -> None:
    daemon = own_daemon()
    training = Training()
    rules = LossRules(warm_steps=5, window_steps=20, spike_steps=2, finite=())
    ckpt = open_ckpt(tmp_run, training.state, socket=daemon.socket, loss_rules=rules)
    ckpt.restore()
    for step in range(1, 11):
        training.step()
        ckpt.step(step, loss=2.0 + step % 2)
    ckpt.save(10).wait(timeout=60)
    ckpt.step(11, loss=math.nan)  # not a thing of these rules
    ckpt.step(12, loss=900.0)
    training.step()
    ckpt.step(13, loss=800.0)
    wait_until(lambda: len(alerts(daemon, tmp_run)) == 2, "what was done", deadline_seconds=40)
    assert "at step 13 loss is 800" in alerts(daemon, tmp_run)[0]
    assert "since step 12" in alerts(daemon, tmp_run)[0]
    assert standings(tmp_run) == {Version(10, 1): Standing(pinned=True)}
    ckpt.save(13).wait(timeout=60)
    assert standings(tmp_run) == {Version(10, 1): Standing(pinned=True)}


def test_where_there_is_nothing_to_go_back_to_the_training_goes_on(
    own_daemon: Start, open_ckpt: Open, tmp_run: str
) -> None:
    daemon = own_daemon()
    ckpt = open_ckpt(tmp_run, Training().state, socket=daemon.socket, on_bad_loss="go_back")
    ckpt.restore()
    ckpt.step(1, loss=math.inf)
    wait_until(lambda: len(alerts(daemon, tmp_run)) == 2, "what was done", deadline_seconds=40)
    assert alerts(daemon, tmp_run)[1] == "rank 0: no good checkpoint from before step 1 is committed"
    ckpt.step(2, loss=1.0)


def test_whatever_is_passed_is_logged_as_far_as_it_is_a_number(
    own_daemon: Start, open_ckpt: Open, tmp_run: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = own_daemon()
    ckpt = open_ckpt(tmp_run, Training().state, socket=daemon.socket)
    ckpt.restore()
    with caplog.at_level(logging.WARNING):
        for wrong in ({"words": "none"}, {"many": torch.ones(3)}):
            with pytest.raises(UsageError, match="metrics are numbers"):
                ckpt.step(1, loss=9.0, **wrong)
        ckpt.step(1, loss=torch.tensor(0.5, requires_grad=True), tokens=7, ok=True, none=None)
        ckpt.step(2, **{"train/acc": torch.tensor([0.25], dtype=torch.float16)}, loss=math.inf, huge=10**400)
        assert caplog.records == []
        ckpt.step(3, **{f"c{number}": number for number in range(LOG_COLUMNS_MAX)})
        ckpt.step(4, **{f"c{number}": number for number in range(LOG_COLUMNS_MAX)})
    assert len([record for record in caplog.records if "training log has room" in record.message]) == 1
    ckpt.close()
    rows = list(wait_for_rows(tmp_run, 4))
    assert rows[0].values == {"loss": 0.5, "tokens": 7.0, "ok": 1.0}
    assert rows[1].values == {"loss": math.inf, "train/acc": 0.25}
    assert len(rows[2].values) == LOG_COLUMNS_MAX - 4


@pytest.mark.parametrize("ranks", ["first", "all", "none"])
def test_whose_log_there_is(open_ckpt: Open, tmp_run: str, ranks: Any) -> None:
    ckpt = open_ckpt(tmp_run, Training().state, log_ranks=ranks)
    ckpt.restore()
    ckpt.step(1, loss=1.0)
    ckpt.close()
    if ranks != "none":
        wait_for_rows(tmp_run, 1)
    assert Path(tmp_run.removeprefix("file://"), "log").exists() == (ranks != "none")


def test_words_that_are_none_are_refused(tmp_run: str) -> None:
    for wrong in ({"log_ranks": "some"}, {"on_bad_loss": "panic"}):
        with pytest.raises(ConfigError, match="one of"):
            Checkpointer(tmp_run, Training().state, **wrong)  # type: ignore[arg-type]


class Arriving:
    """Figures that come when the test says so."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values = values
        self.there = False
        self.waited = 0

    def numbers(self) -> dict[str, float]:
        self.waited += not self.there
        return self.values


def test_rows_wait_for_figures_from_a_device_in_order_and_not_for_ever() -> None:
    pulse = Pulse()
    rows = MappedRows(dict(pulse.parts())["rows"], writable=False)
    progress = Progress(pulse)
    late = [Arriving({"loss": float(step)}) for step in range(1, LATE_ROWS_MAX + 2)]
    progress.report(1, 1, {"tokens": 5.0}, late[0])
    progress.report(2, 2, {"loss": 2.0})
    assert rows.since(0) == []
    late[0].there = True
    progress.report(3, 3, {}, late[2])
    assert [(row.step, row.values) for row in rows.since(0)] == [(1, {"tokens": 5.0, "loss": 1.0}), (2, {"loss": 2.0})]
    for step in range(4, LATE_ROWS_MAX + 4):
        progress.report(step, step, {}, late[min(step, LATE_ROWS_MAX)])
    assert [row.step for row in rows.since(0)] == [1, 2, 3]
    assert late[2].waited == 1  # the one that had waited longest
    progress.close()
    assert [row.step for row in rows.since(0)] == list(range(1, LATE_ROWS_MAX + 4))
    rows.close()
    pulse.close()


@pytest.mark.gpu
def test_a_loss_on_a_gpu_is_logged_and_nothing_waits_for_it() -> None:
    pulse = Pulse()
    rows = MappedRows(dict(pulse.parts())["rows"], writable=False)
    progress = Progress(pulse)
    large = torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for step in range(1, 4):
        for _ in range(20):
            large = large @ large / 8192.0
        values, on_gpu = figures(step, {"loss": large[0, 0] * step})
        assert (values, list(on_gpu or ())) == ({}, ["loss"])
        progress.report(step, step, values, FromGpu(on_gpu or {}))
    assert not torch.cuda.current_stream().query()  # still at it
    assert len(rows.since(0)) < 3
    progress.close()
    assert [row.values for row in rows.since(0)] == [{"loss": float(step)} for step in (1, 2, 3)]
    assert FromGpu({"x": large[0, 0]}).numbers() == {"x": 1.0}
    rows.close()
    pulse.close()
