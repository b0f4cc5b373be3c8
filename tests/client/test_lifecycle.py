"""Either side dies, at any time: what was sealed is committed, and the training goes on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.errors import ConfigError, RunInUse, UsageError
from ckptd_client import Checkpointer
from ckptd_client.reader import open_checkpoint
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training, committed
from tests.client.processes import TrainingProcess

Open = Callable[..., Checkpointer]
Start = Callable[..., Daemon]


def test_a_killed_trainer_resumes_from_memory_and_its_last_snapshot_is_committed(
    own_daemon: Start, tmp_run: str
) -> None:
    daemon = own_daemon("--bandwidth", "1")  # MiB/s: the write goes on long after the kill
    reference = Training()
    expected = [reference.step().hex() for _ in range(6)]

    with TrainingProcess(daemon.socket, tmp_run, steps=6, wait="sealed", die_at=3) as first:
        losses = [first.until("step", step=step)["loss"] for step in (1, 2, 3)]
        first.end()
    with TrainingProcess(daemon.socket, tmp_run, steps=6, seed=9) as second:
        assert second.until("restored")["source"] == "memory"
        assert second.events[-1]["step"] == 3
        losses += [second.until("step", step=step)["loss"] for step in (4, 5, 6)]
        second.until("end")
    assert losses == expected
    assert 3 in committed(tmp_run)  # P3: sealed before the trainer died


def test_trainer_and_daemon_killed_resumes_from_storage(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon()
    reference = Training()
    expected = [reference.step().hex() for _ in range(4)]
    with TrainingProcess(daemon.socket, tmp_run, steps=9, wait="committed", pause_seconds=0.05) as first:
        first.until("saved", step=2)
        daemon.kill()
        first.kill()
    daemon.start()
    with TrainingProcess(daemon.socket, tmp_run, steps=4, seed=9) as second:
        restored = second.until("restored")
        assert restored["source"] == "storage"
        assert restored["step"] >= 2
        for step in range(restored["step"] + 1, 5):
            assert second.until("step", step=step)["loss"] == expected[step - 1]


@pytest.mark.parametrize("bandwidth", ["1000", "0.2"], ids=["idle", "writing"])
def test_r134_the_daemon_is_killed_and_training_goes_on(own_daemon: Start, tmp_run: str, bandwidth: str) -> None:
    daemon = own_daemon("--bandwidth", bandwidth)
    training = Training()
    with Checkpointer(tmp_run, training.state, socket=daemon.socket, every_steps=1, slots=3, max_wait=1.0) as ckpt:
        ckpt.restore()
        training.step()
        save = ckpt.step(1)
        assert save is not None
        save.wait("sealed", timeout=10)
        daemon.kill()
        training.step()
        assert ckpt.step(2) is not None  # the arena is still mapped here
        # Somebody starts another one: here the client itself.
        save.wait("committed", timeout=60)
        training.step()
        third = ckpt.step(3)
        assert third is not None
        third.wait("committed", timeout=60)
    assert {1, 3} <= set(committed(tmp_run))


def test_a_trainer_killed_while_it_fills_leaves_the_snapshot_before(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon()
    with TrainingProcess(daemon.socket, tmp_run, steps=400, width=512, layers=4) as first:
        first.until("saved", step=4)
        first.kill()  # at whatever point of its copies
    with TrainingProcess(daemon.socket, tmp_run, steps=1, width=512, layers=4, every_steps=10**6) as second:
        restored = second.until("restored")
        assert restored["source"] == "memory"
        assert restored["step"] >= 3
    wait_until(lambda: restored["step"] in committed(tmp_run), "the snapshot to be committed", deadline_seconds=30)


def test_a_stopped_trainer_keeps_its_rank(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon()
    with TrainingProcess(daemon.socket, tmp_run, steps=10**6, every_steps=10**6, pause_seconds=0.02) as first:
        first.until("step", step=2)
        first.signal(signal.SIGSTOP)
        with pytest.raises(RunInUse, match=rf"process {first.pid}"):
            Checkpointer(tmp_run, Training().state, socket=daemon.socket)
        first.signal(signal.SIGCONT)
        first.until("step")
        # Who insists gets it, and the first one is told at its next save.
        with Checkpointer(tmp_run, Training().state, socket=daemon.socket, takeover=True) as ckpt:
            ckpt.restore()
            ckpt.save(1).wait(timeout=30)


def test_r131_a_run_whose_last_save_failed_does_not_end_as_if_all_were_well(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon()
    training = Training()
    ckpt = Checkpointer(tmp_run, training.state, socket=daemon.socket)
    training.step()
    ckpt.save(1).wait(timeout=30)
    folder = Path(tmp_run.removeprefix("file://")) / "checkpoints"
    folder.rename(folder.with_name("gone"))
    folder.write_text("a file where a folder has to be")
    training.step()
    save = ckpt.save(2)
    with pytest.raises(Exception, match="checkpoints"):
        ckpt.close()
    assert save.state == "failed"
    assert "checkpoints" in str(save.error)


def test_r132_the_last_save_is_the_latest(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state) as ckpt:
        training.step()
        ckpt.save(1)
        training.step()
        ckpt.save(2)
    with open_checkpoint(tmp_run) as view:
        assert view.step == 2


def test_r133_a_failure_reaches_the_loop_once_with_its_step(
    own_daemon: Start, tmp_run: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = own_daemon()
    training = Training()
    folder = Path(tmp_run.removeprefix("file://"))
    with Checkpointer(tmp_run, training.state, socket=daemon.socket, every_steps=1) as ckpt:
        training.step()
        first = ckpt.step(1)
        assert first is not None
        first.wait(timeout=30)
        (folder / "checkpoints").rename(folder / "aside")
        (folder / "checkpoints").write_text("in the way")
        training.step()
        failed = ckpt.step(2)
        assert failed is not None
        wait_until(lambda: failed.done, "the save to fail", deadline_seconds=60)
        (folder / "checkpoints").unlink()
        (folder / "aside").rename(folder / "checkpoints")
        for step in (3, 4):
            training.step()
            save = ckpt.step(step)  # logs the failure, once, and saves
            assert save is not None
            save.wait(timeout=30)
    assert failed.state == "failed"
    assert [r.getMessage() for r in caplog.records if "step 2 failed" in r.getMessage()].__len__() == 1
    assert committed(tmp_run) == [1, 3, 4]


def test_r137_a_forked_child_cannot_disturb_its_parent(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state) as ckpt:
        ckpt.save(0).wait(timeout=30)
        child = os.fork()
        if child == 0:
            try:
                ckpt.save(7)
            except Exception:
                os._exit(42)  # refused, as it must be
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        training.step()
        ckpt.save(1).wait(timeout=30)
    assert committed(tmp_run) == [0, 1]


def test_r146_a_trainer_may_come_before_the_daemon(private_folders: Path, tmp_run: str) -> None:
    socket = private_folders / "nobody" / "daemon.sock"
    training = Training()
    with Checkpointer(tmp_run, training.state, socket=socket) as ckpt:  # starts one
        training.step()
        ckpt.save(1).wait(timeout=30)
        daemon_pid = ckpt.daemon_pid
    assert committed(tmp_run) == [1]
    os.kill(daemon_pid, signal.SIGTERM)
    ended, status = os.waitpid(daemon_pid, 0)  # it is a child of this process
    assert (ended, os.waitstatus_to_exitcode(status)) == (daemon_pid, 0)


def test_ctrl_c_in_the_middle_of_a_copy_leaves_nothing_stuck(
    open_ckpt: Open, tmp_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptd_client.staging import stager

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, slots=1)
    copy_now = stager.copy_now
    monkeypatch.setattr(stager, "copy_now", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(1)
    monkeypatch.setattr(stager, "copy_now", copy_now)
    training.step()
    ckpt.save(2).wait(timeout=30)  # the only slot is free again
    assert committed(tmp_run) == [2]


@pytest.mark.parametrize("step", ["a", 2.5, -1, 10**13, None])
def test_a_step_that_is_none_is_refused_and_harms_nothing(open_ckpt: Open, tmp_run: str, step: object) -> None:
    ckpt = open_ckpt(tmp_run, {"x": [1]}, every_steps=1)
    with pytest.raises(UsageError, match="is not an integer between"):
        ckpt.step(step)  # type: ignore[arg-type]
    save = ckpt.step(1, loss=None, huge=10**400)
    assert save is not None
    save.wait(timeout=30)


@pytest.mark.parametrize("url", ["", "/", "file://", "file:///"])
def test_a_place_that_can_be_no_run_is_refused_by_name(daemon: Daemon, url: str) -> None:
    with pytest.raises(ConfigError, match="names no folder"):
        Checkpointer(url, {"x": [1]}, socket=daemon.socket)


def test_memory_of_a_run_that_was_deleted_does_not_come_back(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state) as ckpt:
        ckpt.restore()
        training.step()
        ckpt.save(200).wait(timeout=30)
    shutil.rmtree(tmp_run.removeprefix("file://"))
    with open_ckpt(tmp_run, training.state) as ckpt:
        assert ckpt.restore().source == "none"
        training.step()
        ckpt.save(20).wait(timeout=30)
    with open_ckpt(tmp_run, Training(seed=3).state) as ckpt:
        restored = ckpt.restore()
    assert (restored.step, restored.generation) == (20, 2)
