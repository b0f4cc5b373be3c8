"""What the launcher starts: a training of one layer with a twist. ``script.py URL FOLDER SCENARIO [TIMES]``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

URL, FOLDER, SCENARIO = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
TIMES = int(sys.argv[4]) if len(sys.argv) > 4 else 0
"""So many lives end badly."""
RANK = int(os.environ["RANK"])
LAST = {"hang": 60, "host": 100_000, "long": 100_000, "nan": 30}.get(SCENARIO, 15)
TOGETHER = SCENARIO in ("stop", "hang", "fails", "host", "long", "nan")
"""With a collective in each step."""


def tell(**fields: Any) -> None:
    """One line, which no kill cuts in two."""
    path = FOLDER / f"rank{RANK}.jsonl"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, json.dumps(fields).encode() + b"\n")
    os.close(fd)


def lives(pid: int) -> bool:
    """Whether a process has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def first_time() -> bool:
    """Whether no start of this launch has come here before."""
    with contextlib.suppress(FileExistsError):
        (FOLDER / "first").touch(exist_ok=False)
        return True
    return False


def lives_so_far() -> int:
    """How many lives of this rank have restored, with this one."""
    return sum("restored" in line for line in (FOLDER / f"rank{RANK}.jsonl").read_text().splitlines())


def main() -> None:
    """One life of the training."""
    child = FOLDER / "child"
    tell(child_lives=child.exists() and lives(int(child.read_text())))
    if SCENARIO == "typo":
        raise SystemExit("no such option")

    import torch

    from ckptd_client import Checkpointer

    if TOGETHER:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    every = {"stop": None, "fails": 2}.get(SCENARIO, 5)
    bad: Any = {"on_bad_loss": "go_back"} if SCENARIO == "nan" else {}
    with Checkpointer(URL, state, every_steps=every, start_daemon=False, **bad) as ckpt:
        start = ckpt.restore(0 if SCENARIO == "orphan" else "latest")  # 0: from nothing, as the user once began
        tell(restored=start.step, source=start.source, pid=os.getpid())
        step = start.step
        is_bad = SCENARIO == "nan" and lives_so_far() == 1
        while step < LAST or SCENARIO == "stop" or is_bad:
            step += 1
            loss = model(torch.ones(1, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if SCENARIO == "hang" and step == 40 and first_time():
                time.sleep(300)
            if SCENARIO == "fails" and RANK == 1 and step == 8 and lives_so_far() <= TIMES:
                raise SystemExit(3)
            if TOGETHER:
                torch.distributed.barrier()
                time.sleep(0.02)
            if SCENARIO == "bad" and step == 9 and first_time():
                with torch.no_grad():
                    model.weight.fill_(torch.nan)
            if is_bad and step >= 13:
                loss = loss * torch.nan
            if SCENARIO == "host" and RANK == 0 and step == 20 and first_time():
                os.kill(os.getppid(), signal.SIGKILL)  # the launcher, and this one with it; others save this step
                time.sleep(300)
            tell(step=step)
            ckpt.step(step, loss=loss)
            if SCENARIO == "bad" and step == 13 and not loss.isfinite():
                raise SystemExit(3)
            if SCENARIO == "orphan" and step == 12 and first_time():
                # Of a session of its own, so that no group knows it.
                child.write_text(str(subprocess.Popen(["sleep", "300"], start_new_session=True).pid))
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
