"""The suite's own rules bite: a skip for no listed reason fails, and so does what a test leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

CULPRITS = """
import os, subprocess, threading, time
import pytest, tests.conftest

tests.conftest.GOING_SECONDS = 0.3  # what is left behind here never goes by itself

def test_skip(): pytest.skip("no time today")
def test_process(): subprocess.run("setsid --fork sleep 60 < /dev/null > /dev/null 2>&1; sleep 0.3", shell=True)
def test_thread(): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
def test_descriptor(): os.memfd_create("forgotten")
def test_listed(): pytest.skip("needs a CUDA device")
def test_good(): pass
"""
WHOLE_MODULE = "import pytest\npytest.skip('not at all', allow_module_level=True)\n"


def test_rules_bite(tmp_path: Path) -> None:
    (tmp_path / "test_culprits.py").write_text(CULPRITS)
    (tmp_path / "test_whole_module.py").write_text(WHOLE_MODULE)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", tmp_path]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*argv, "--continue-on-collection-errors"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    for complaint in (
        "not in tests/allowed_skips.txt: no time today",
        "not in tests/allowed_skips.txt: not at all",
        "left behind: process",
        "left behind: thread",
        "left behind: descriptor",
        "1 failed, 4 passed, 1 skipped, 4 errors",
    ):
        assert complaint in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
