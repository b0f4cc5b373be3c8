"""Nothing is unpickled by trainer, daemon or command line, in saving, restoring and verifying."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from devtools.processes import kill_group, spawn, wait_until
from tests.chaos.children import daemons_at
from tests.client.conftest import committed
from tests.client.processes import TrainingProcess

WATCHED = Path(__file__).parent / "watched"
CLI = "from ckptd.cli import main; main()"


@pytest.fixture
def watched(tmp_path: Path) -> Mapping[str, str]:
    """The environment of watched processes."""
    path = os.pathsep.join([str(WATCHED), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "CKPTD_TEST_PICKLES": str(tmp_path / "pickles")}


def _run(code: str, *args: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_r166_the_watch_sees_what_it_looks_for(watched: Mapping[str, str]) -> None:
    done = _run("import pickle, collections; pickle.loads(pickle.dumps(collections.OrderedDict))", env=watched)
    assert "something was unpickled" in done.stderr
    assert "OrderedDict" in Path(watched["CKPTD_TEST_PICKLES"]).read_text()


def test_r166_r167_nothing_is_unpickled(watched: Mapping[str, str], private_folders: Path, tmp_run: str) -> None:
    socket = private_folders / "watched" / "d.sock"
    socket.parent.mkdir(mode=0o700)
    daemon = spawn([sys.executable, "-m", "ckptd.daemon", "--socket", socket], env=watched)
    try:
        wait_until(socket.exists, "the daemon", deadline_seconds=60)
        with TrainingProcess(socket, tmp_run, env=watched, steps=2) as first:
            first.until("end")
        with TrainingProcess(socket, tmp_run, env=watched, steps=3, seed=5) as second:
            assert second.until("restored")["step"] == 2
            second.until("end")
    finally:
        kill_group(daemon)
    assert committed(tmp_run) == [1, 2, 3]
    # Once more, from storage, with a daemon that the trainer starts; and by the command line.
    with TrainingProcess(socket, tmp_run, env=watched, steps=3, seed=6) as third:
        assert third.until("restored")["source"] == "storage"
        third.until("end")
    for started in daemons_at(socket):
        started.kill()
        started.wait(60)
    done = _run(CLI, "verify", tmp_run, env=watched)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not Path(watched["CKPTD_TEST_PICKLES"]).exists(), Path(watched["CKPTD_TEST_PICKLES"]).read_text()
