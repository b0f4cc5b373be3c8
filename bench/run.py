"""A run: each subject in turn, round after round, on one folder of one disk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from bench.environments import NotInstalled, interpreter
from bench.settings import Settings
from bench.subjects import SUBJECTS
from devtools.processes import kill_group, spawn

FORMAT = "ckptd-bench/1"
_RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
_PATH = re.compile(r"(?<![\w.])(/[\w.+-]+)+")
ROOT = Path(__file__).parent.parent

Results = dict[str, Any]
"""As it is written to a file: ``format``, ``settings``, ``machine``, and by subject the ``turns``."""


def run(settings: Settings, names: Sequence[str], folder: Path, after_turn: Callable[[Results, str], None]) -> Results:
    """Give each subject its turns. What fails is said in its turn's ``error``; the others go on.

    ``after_turn`` is called with all results so far, and how the turn went in words.
    """
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    results: Results = {"format": FORMAT, "settings": asdict(settings), "machine": {}, "subjects": turns}
    for number in range(settings.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            began = time.monotonic()
            turn = _turn(name, settings, folder)
            results["machine"] |= turn.pop("machine", {})
            turns[name].append(turn)
            outcome = f"{turn.get('error') or 'ok'}, {time.monotonic() - began:.0f} s"
            after_turn(results, f"round {number + 1} of {settings.rounds}, {name}: {outcome}")
    return results


def _turn(name: str, settings: Settings, folder: Path) -> dict[str, Any]:
    try:
        python = interpreter(SUBJECTS[name].environment)
    except NotInstalled as error:
        return {"error": str(error)}
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="turn-", dir=folder, ignore_cleanup_errors=True) as place:
        result, log = Path(place) / "result.json", Path(place) / "log"
        argv: list[str | Path] = [python, "-m", "bench.turn", name, json.dumps(asdict(settings)), place, result]
        with log.open("wb") as output:
            process = spawn(argv, env={"OMP_NUM_THREADS": "1"}, cwd=ROOT, output=output)
            try:
                process.wait(settings.turn_seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {settings.turn_seconds:g} s"}
            finally:
                kill_group(process)
        if process.returncode == 0:
            return cast("dict[str, Any]", json.loads(result.read_bytes()))
        return {"error": last_words(log.read_text(errors="replace"), process.returncode)}


def last_words(text: str, code: int) -> str:
    """What an exception said at last, with only the last parts of paths: what lies where here is not told."""
    lines = [line.removeprefix("[rank0]: ") for line in text.splitlines()]
    whole = [line for line in lines if line and not line[0].isspace()]
    raised = [line for line in whole if _RAISED.match(line)]
    words = (raised or whole or [f"ended with {code}"])[-1]
    return _PATH.sub(lambda path: path[0].rpartition("/")[2], words)[:300]


def free_bytes(folder: Path) -> int:
    """Room on the disk that a folder will lie on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
