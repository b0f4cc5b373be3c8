"""Cases that take a whole trainer and a whole daemon: memory, processes, storage faults, and what a person can see."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckptd.errors import SaveError, StateError
from ckptd_client import Checkpointer
from ckptd_client.reader import open_checkpoint
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training

Open = Callable[..., Checkpointer]
Start = Callable[..., Daemon]


def test_r75_a_receipt_that_shows_late_is_waited_for(open_ckpt: Open, tmp_path: Path) -> None:
    """Rank 1's folder becomes visible seconds after rank 0 has finished, as on a network file system."""
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    first = open_ckpt(f"file://{shown}", {"x": torch.ones(4)}, rank=0, world=1, launch="a")
    first.save(1).wait(timeout=30)
    first.close()
    # What rank 0 wrote is moved away and comes back later: whoever reads by name must be patient, and lists prove
    # nothing.
    (shown / "run.json").rename(hidden)
    with open_ckpt(f"file://{shown}", {"x": torch.zeros(4)}, rank=0, world=1, launch="b") as second:
        with pytest.raises(Exception, match=r"run\.json"):
            second.restore()  # says what is missing, and does not take the place for empty
        hidden.rename(shown / "run.json")
        assert second.restore().step == 1


def test_r85_a_name_is_written_once(open_ckpt: Open, tmp_run: str) -> None:
    root = Path(tmp_run.removeprefix("file://"))
    state = {"x": torch.ones(1000)}
    with open_ckpt(tmp_run, state) as ckpt:
        first = ckpt.save(1)
        first.wait(timeout=30)
        before = {path: path.read_bytes() for path in root.glob("checkpoints/**/*") if path.is_file()}
        state["x"].fill_(2)
        assert ckpt.save(1) is first
    with open_ckpt(tmp_run, state) as ckpt:  # another life saves the same step under names of its own
        ckpt.restore(step=0)
        ckpt.save(1).wait(timeout=30)
    assert {path: path.read_bytes() for path in before} == before


def test_r136_nothing_is_forked_for_a_save(open_ckpt: Open, daemon: Daemon, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state, every_steps=1) as ckpt:
        seen: set[int] = set()
        for step in range(1, 6):
            training.step()
            save = ckpt.step(step)
            assert save is not None
            seen |= {child.pid for child in psutil.Process(daemon.pid).children(recursive=True)}
            save.wait(timeout=30)
    assert not seen


def test_r142_a_state_that_does_not_fit_is_refused_with_figures(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon("--memory-budget", "8")  # MiB
    state = {"x": torch.ones(4 * 2**20)}  # 16 MiB
    with Checkpointer(tmp_run, state, socket=daemon.socket) as ckpt:
        save = ckpt.save(1)
        with pytest.raises(SaveError, match=r"arena of .* does not fit: .* are left"):
            save.wait("sealed", timeout=30)
        state["x"] = torch.ones(10)
        ckpt.save(2).wait(timeout=30)  # training went on, and a smaller one fits


def test_r142_one_slot_where_two_do_not_fit(own_daemon: Start, tmp_run: str, caplog: pytest.LogCaptureFixture) -> None:
    daemon = own_daemon("--memory-budget", "24")
    with Checkpointer(tmp_run, {"x": torch.ones(4 * 2**20)}, socket=daemon.socket) as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait(timeout=30)
    assert "so one is used" in caplog.text


class Unknown:
    """Has no codec, and is defined where the daemon cannot import it."""


def test_r147_no_class_of_the_trainers_crosses_to_the_daemon(open_ckpt: Open, tmp_run: str) -> None:
    with pytest.raises(StateError, match=r"thing/inner.*Unknown"):
        open_ckpt(tmp_run, {"thing": {"inner": Unknown()}})
    with open_ckpt(tmp_run, {"thing": {"inner": [1]}}) as ckpt:
        ckpt.save(1).wait(timeout=30)


def test_r176_a_slow_write_shows_its_progress(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon("--bandwidth", "4")
    with Checkpointer(tmp_run, {"x": torch.ones(8 * 2**20)}, socket=daemon.socket) as ckpt:
        save = ckpt.save(1)
        save.wait("sealed", timeout=30)
        shown: dict[str, Any] = {}

        def writing() -> bool:
            command = [Path(sys.executable).with_name("ckptd"), "status", "--json", "--socket", str(daemon.socket)]
            saves = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["saves"]["listed"]
            shown.update(saves[0] if saves else {})
            return bool(saves) and 0 < shown["bytes_done"] < shown["bytes"]

        wait_until(writing, "a write in progress", deadline_seconds=30, every_seconds=0.1)
        assert shown["version"] == str(save.version)
        assert shown["stage"] == "write"
        assert shown["bytes"] == save.stats.bytes
        assert shown["bytes_per_second"] > 0
        assert shown["progress_age_seconds"] >= 0
        save.wait(timeout=60)


def test_r182_the_time_of_a_save_is_told_by_phase(own_daemon: Start, tmp_run: str) -> None:
    daemon = own_daemon("--bandwidth", "8")
    started = time.monotonic()
    with Checkpointer(tmp_run, {"x": torch.ones(4 * 2**20)}, socket=daemon.socket) as ckpt:
        save = ckpt.save(1)
        save.wait(timeout=60)
        passed = time.monotonic() - started
    stats = save.stats
    phases = [stats.copy_seconds, stats.queue_seconds, stats.write_seconds, stats.commit_seconds]
    assert all(seconds >= 0 for seconds in phases)
    assert stats.write_seconds == max(phases), "the slow disk is where the time went"
    assert stats.write_seconds > 0.5  # 16 MiB at 8 MiB/s, less the burst
    assert sum(phases) <= passed + 0.1


def test_r25_thousands_of_tensors_with_few_descriptors(own_daemon: Start, tmp_run: str) -> None:
    """20,000 tensors of 8 bytes, where a process may open 256 files: one arena, few descriptors."""
    daemon = own_daemon()
    code = f"""
import resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from ckptd_client import Checkpointer
state = {{"t": {{str(i): torch.full((2,), float(i)) for i in range(20_000)}}}}
with Checkpointer({tmp_run!r}, state, socket={str(daemon.socket)!r}, rng=False) as ckpt:
    ckpt.save(1).wait(timeout=100)
    for value in state["t"].values():
        value.add_(1)
    ckpt.save(2).wait(timeout=100)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
    with open_checkpoint(tmp_run, 2) as view:
        assert len(view) == 20_000
        assert view["t/17777"].tensor().tolist() == [17778.0, 17778.0]


def test_r26_the_plan_is_kept_until_the_structure_changes(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state, every_steps=1) as ckpt:
        plans = []
        for step in range(1, 6):
            training.step()
            if step == 4:
                training.model.register_buffer("extra", torch.ones(3))
            ckpt.step(step)
            plans.append(ckpt._snapshots._plan)
    assert plans[0] is plans[1] is plans[2]
    assert plans[3] is not plans[2]
    assert plans[3] is plans[4]
    with open_checkpoint(tmp_run, 5) as view:
        assert view["model/extra"].tensor().tolist() == [1.0, 1.0, 1.0]


def test_r01_a_tensor_over_2_gib_keeps_its_tail(own_daemon: Start, tmp_run: str) -> None:
    """One tensor over 2 GiB, one slot, in a process of its own; read back piece by piece."""
    daemon = own_daemon()
    code = f"""
import torch
from ckptd_client import Checkpointer
count = (2 << 30) // 4 + 1024
big = torch.arange(count, dtype=torch.int32)
with Checkpointer({tmp_run!r}, {{"big": big}}, socket={str(daemon.socket)!r}, rng=False, slots=1) as ckpt:
    ckpt.save(1).wait(timeout=100)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=115)
    with open_checkpoint(tmp_run, 1) as view:
        count = view["big"].shape[0]
        for start in (0, 2**29 - 512, count - 1000):
            stop = min(start + 1000, count)
            assert torch.equal(view["big"][start:stop], torch.arange(start, stop, dtype=torch.int32))
