"""The example scripts run as their docstrings say, and ckptd changes nothing about a training."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from ckptd.wire.channel import SOCKET_VARIABLE
from devtools.processes import kill_group, spawn
from examples.demo.compare import differences, events
from examples.demo.stage import stage

ROOT = Path(__file__).parents[2]
SMALL = ("--layers", "1", "--width", "32", "--batch", "2")
FAST = 2.0**40


@pytest.mark.timeout(240)
def test_interrupted_training_equals_one_that_never_imported_ckptd(tmp_path: Path) -> None:
    with stage(tmp_path / "plain", "", {}, lambda: None) as plain:
        plain.start_trainer(["--plain", "--steps", "9", *SMALL])
        plain.wait_for_trainer()
    assert [end["imported_ckptd"] for end in events(plain.folder, "end")] == [False]

    with stage(tmp_path / "ours", f"{tmp_path}/run", {}, lambda: None) as ours:
        ours.start_daemon(FAST)
        for steps in ("5", "9"):
            ours.start_trainer([ours.url, "--steps", steps, "--every", "2", *SMALL])
            ours.wait_for_trainer()
    assert [(event["source"], event["step"]) for event in events(ours.folder, "restored")] == [
        ("none", 0),
        ("memory", 4),
    ]
    assert [save["step"] for save in events(ours.folder, "save")] == [2, 4, 6, 8]
    assert [end["imported_ckptd"] for end in events(ours.folder, "end")] == [True, True]
    assert differences(plain.folder, ours.folder) == []


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ranks_go_on_together(tmp_path: Path) -> None:
    """Under torchrun and gloo: they commit together, and restore together from storage."""
    world = 2
    url = tmp_path / "run"
    with stage(tmp_path / "s", str(url), {}, lambda: None) as first:
        first.start_daemon(FAST)
        _torchrun(world, url, tmp_path / "first", first.socket)
    (newest,) = (url / "manifests").glob("*6-*.json")
    newest.unlink()  # as if step 6 had never been
    shutil.rmtree(url / "checkpoints" / newest.stem)
    with stage(tmp_path / "t", str(url), {}, lambda: None) as second:
        second.start_daemon(FAST)
        _torchrun(world, url, tmp_path / "second", second.socket)
    for rank in range(world):
        before, after = _losses(tmp_path / f"first.{rank}.jsonl"), _losses(tmp_path / f"second.{rank}.jsonl")
        assert list(before) == [1, 2, 3, 4, 5, 6]
        assert list(after) == [4, 5, 6]
        assert after == {step: before[step] for step in after}


def _torchrun(world: int, url: Path, log: Path, socket: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
    argv += ["-m", "examples.ddp", str(url), "--steps", "6", "--every", "3", "--events", str(log.with_suffix(".jsonl"))]
    output = log.with_suffix(".txt")
    with output.open("wb") as out:
        process = spawn(argv, env={SOCKET_VARIABLE: str(socket), "OMP_NUM_THREADS": "1"}, cwd=ROOT, output=out)
    try:
        assert process.wait(100) == 0, output.read_text()
    finally:
        kill_group(process)


def _losses(path: Path) -> dict[int, float]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {event["step"]: event["loss"] for event in found if event["event"] == "step"}


@pytest.mark.parametrize("module", ["examples.train", "examples.ddp", "examples.elastic", "examples.demo"])
def test_help_needs_no_run(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert end.value.code == 0
    assert module in capsys.readouterr().out
