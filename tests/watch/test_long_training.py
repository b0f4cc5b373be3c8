"""A real training of two thousand steps, most of them short and some not: nothing is done about any; then it hangs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from devtools.processes import free_ports, kill_group, spawn, wait_until
from tests.watch.conftest import Watching

STEPS = 2000
EVALS = tuple(range(120, STEPS, 120))
COMPILES = (310, 730, 1150, 1570)
FLOOR_SECONDS = 3.0
"""No step of a busy machine takes so long."""
EVAL_SECONDS = 2 * FLOOR_SECONDS
RUN_SECONDS = 600


@pytest.mark.long
@pytest.mark.timeout(RUN_SECONDS + 120)
def test_two_thousand_real_steps_with_evaluations_and_compiles_and_then_a_hang(
    watching: Callable[..., Watching], tmp_run: str, tmp_path: Path
) -> None:
    assert len(EVALS) + len(COMPILES) == 20
    watched = watching(
        "--on-hang", "notify,dump,end", "--hang-grace", "1", "--hang-floor", str(FLOOR_SECONDS), "--hang-first", "240"
    )
    config = {
        "url": tmp_run,
        "socket": str(watched.socket),
        "steps": STEPS,
        "evals": EVALS,
        "compiles": COMPILES,
        "eval_seconds": EVAL_SECONDS,
    }
    outputs = [tmp_path / f"rank{rank}.txt" for rank in range(2)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2"}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, path in enumerate(outputs):
        with path.open("ab") as output:
            argv = [sys.executable, "-m", "tests.watch.long_training", json.dumps(config)]
            own = {"RANK": str(rank), "CKPTD_LAUNCH_ID": "long#0"}
            ranks.append(spawn(argv, env={**meeting, **cache, **own}, output=output))
    try:

        def hangs_now() -> bool:
            assert all(process.poll() is None for process in ranks), "\n".join(path.read_text() for path in outputs)
            return all(f"hanging after {STEPS}" in path.read_text() for path in outputs)

        wait_until(hangs_now, f"{STEPS} steps", deadline_seconds=RUN_SECONDS, every_seconds=0.2)
        before = watched.watch()
        limit_seconds = before["limits_seconds"][tmp_run]["step"]
        assert limit_seconds == FLOOR_SECONDS, "learned from short steps"
        assert [alert["kind"] for alert in before["alerts"]] == []
        assert before["counts"].get("hangs", 0) == 0
        assert [process.wait(60) for process in ranks] == [-signal.SIGKILL] * 2
        after = watched.watch()
        assert after["counts"]["hangs"] == 1
        assert after["counts"]["end"] >= 1
        assert "long_training.py" in json.dumps(watched.report())
        assert outputs[0].read_text().count("compiled at") == len(COMPILES)
    finally:
        for process in ranks:
            kill_group(process)
