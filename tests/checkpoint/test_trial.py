"""A checkpoint is loaded in a process of its own, and its end is judged."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.trial import Loader, Tried, try_loading
from ckptd.checkpoint.verdicts import record_verdict
from ckptd.checkpoint.verify import verify
from ckptd.errors import ConfigError
from ckptd.format.keys import Version, tombstone_key
from ckptd.format.records import Tombstone, encode
from devtools.processes import wait_until
from tests.checkpoint.builder import make_run

LOADERS = """
import os, pathlib, psutil, signal, subprocess, sys, time

def good(url, checkpoint, options):
    assert (url, checkpoint, options) == ("file:///run", "10-g1", {"secret": "s"}), "not what was sent"
    process = psutil.Process()
    assert process.nice() == 19 and process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    assert "secret" not in " ".join(sys.argv) and "secret" not in "".join(os.environ)

def bad(url, checkpoint, options):
    print("loading")
    raise ValueError("weights of\\nanother model")

def leaves(url, checkpoint, options):
    sys.exit(0)

def crashes(url, checkpoint, options):
    os.kill(os.getpid(), signal.SIGSEGV)

def is_killed(url, checkpoint, options):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(url, checkpoint, options):
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loaders.py").write_text(LOADERS)
    (tmp_path / "broken.py").write_text("import no_such_module")
    return tmp_path


async def tried(folder: Path, function: str, *, deadline_seconds: float = 60.0, python: str = "") -> Tried:
    loader = Loader(function=function, folder=str(folder), path=(str(folder), *filter(None, sys.path)), python=python)
    version, options = Version(10, 1), {"secret": "s"}
    return await try_loading(loader, "file:///run", version, options, deadline_seconds=deadline_seconds)


@pytest.mark.parametrize(
    ("function", "result", "reason"),
    [
        ("loaders:good", "good", ""),
        ("loaders:bad", "bad", "loaders:bad ended with status 1: ValueError: weights of another model"),
        ("loaders:leaves", "bad", "SystemExit: 0"),
        ("loaders:crashes", "bad", "ended by signal 11"),
        ("loaders:is_killed", "unknown", "SIGKILL"),
        ("loaders:nothing", "unknown", "was not begun: AttributeError"),
        ("broken:load", "unknown", "was not begun: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
async def test_the_end_is_judged(folder: Path, function: str, result: str, reason: str) -> None:
    found = await tried(folder, function)
    assert (found.result, reason in found.reason) == (result, True), found


async def test_what_takes_too_long_is_ended_with_all_that_it_started(folder: Path) -> None:
    noted = folder / "pids"
    for seconds in (3.0, 12.0, 48.0):  # a busy machine takes longer to begin
        found = await tried(folder, "loaders:hangs", deadline_seconds=seconds)
        assert (found.result, f"within {seconds:g} s" in found.reason) == ("unknown", True)
        if noted.exists():
            break
    pids = noted.read_text().split()

    def ended() -> bool:
        return not any(os.path.exists(f"/proc/{pid}/cmdline") and _is_alive(pid) for pid in pids)

    wait_until(ended, "the end of both", deadline_seconds=20)


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_an_interpreter_that_is_not_there_says_nothing(folder: Path) -> None:
    found = await tried(folder, "loaders:good", python="/no/such/python")
    assert (found.result, "/no/such/python" in found.reason) == ("unknown", True)


@pytest.mark.parametrize("text", ["load", "a:", ":b", "a b:c", "a:b.c", "../x:y"])
def test_what_names_no_function_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="module:function"):
        Loader.here(text)


async def test_verdicts_are_recorded_once_and_the_latest_holds(run: Run) -> None:
    (version,) = await make_run(run, [10])
    for good, kinds in ((True, 1), (True, 1), (False, 2), (False, 2), (True, 3)):
        assert await record_verdict(run, version, good=good, by="test", reason="")
        assert len(await run.marks(version)) == kinds
        standing = (await run.standings())[version]
        assert (standing.verified, standing.suspect) == (good, not good)


async def test_of_what_is_being_deleted_nothing_is_said(run: Run) -> None:
    made = await make_run(run, [10, 20])
    await run.backend.put(tombstone_key(made[0]), encode(Tombstone(reason="", version=str(made[0]))))
    assert not await record_verdict(run, made[0], good=False, by="test", reason="")
    assert not await record_verdict(run, Version(30, 1), good=False, by="test", reason="")
    assert await run.standings() == {}
    found = await verify(run, made[1])
    assert found.with_trial(Tried("unknown", "no time")).good
    assert not found.with_trial(Tried("unknown", "no time")).conclusive
    assert found.with_trial(Tried("bad", "no")).reason == "no"
