"""``make demo`` keeps its word, and leaves nothing behind: not at its end, and not when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from devtools.processes import kill_group, spawn, wait_until
from examples.demo.stage import DemoFailed, Stage
from examples.demo.story import Moment, moment

ROOT = Path(__file__).parents[2]


@dataclass
class _Daemon:
    """Says what the test wants it to say."""

    saves: list[dict[str, Any]]

    def status(self) -> dict[str, Any]:
        return {"saves": {"listed": self.saves}}


def _save(**fields: Any) -> dict[str, Any]:
    return {"version": "000000000020-g000001", "stage": "write", "bytes_done": 1, "bytes": 2, **fields}


def test_a_kill_inside_a_write_counts() -> None:
    assert moment(cast(Stage, _Daemon([_save()])), 20) == Moment(20, 1, 2)


@pytest.mark.parametrize(
    "save",
    [
        _save(stage="commit", bytes_done=2),
        _save(stage="queue", bytes_done=0),
        _save(bytes_done=0),
        _save(bytes_done=2),
        _save(version="000000000010-g000001"),
    ],
)
def test_a_kill_outside_a_write_ends_the_demo(save: dict[str, Any]) -> None:
    with pytest.raises(DemoFailed, match="proves nothing"):
        moment(cast(Stage, _Daemon([save])), 20)


def _start(temporary: Path, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    temporary.mkdir()
    output = temporary.with_suffix(".txt")
    with output.open("wb") as out:
        argv = [sys.executable, "-m", "examples.demo", *options]
        return spawn(argv, env={"TMPDIR": str(temporary)}, cwd=ROOT, output=out), output


def _check_nothing_left(process: subprocess.Popen[bytes], temporary: Path) -> None:
    assert list(temporary.iterdir()) == []
    assert list(Path("/tmp").glob(f"ckptd-demo-{process.pid}-*")) == []


@pytest.mark.timeout(400)
def test_demo_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    process, output = _start(tmp_path / "t", "--only", "disk")
    try:
        assert process.wait(380) == 0, output.read_text()
    finally:
        kill_group(process)
    shown = output.read_text()
    for words in ("Equal, bit for bit", "memory: step 20", "storage: step 30", "start = ckpt.restore()"):
        assert words in shown, shown
    _check_nothing_left(process, tmp_path / "t")


def test_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    process, output = _start(tmp_path / "t")
    try:
        wait_until(lambda: any((tmp_path / "t").glob("*/plain/log.jsonl")), "the first step", deadline_seconds=60)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 130, output.read_text()
    finally:
        kill_group(process)
    assert "nothing is left running" in output.read_text()
    _check_nothing_left(process, tmp_path / "t")
