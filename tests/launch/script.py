"""What the launcher starts: a training of one layer with a twist. ``script.py URL FOLDER SCENARIO``."""

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
RANK = int(os.environ["RANK"])
LAST = 15


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


def main() -> None:
    """One life of the training."""
    child = FOLDER / "child"
    tell(child_lives=child.exists() and lives(int(child.read_text())))
    if SCENARIO == "typo":
        raise SystemExit("no such option")

    import torch

    from ckptd_client import Checkpointer

    if SCENARIO == "stop":
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    every = None if SCENARIO == "stop" else 5
    with Checkpointer(URL, state, every_steps=every, start_daemon=False) as ckpt:
        start = ckpt.restore(0 if SCENARIO == "orphan" else "latest")  # 0: from nothing, as the user once began
        tell(restored=start.step, source=start.source, pid=os.getpid())
        step = start.step
        while step < LAST or SCENARIO == "stop":
            step += 1
            loss = model(torch.ones(1, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if SCENARIO == "stop":
                torch.distributed.barrier()
                time.sleep(0.02)
            if SCENARIO == "bad" and step == 9 and first_time():
                with torch.no_grad():
                    model.weight.fill_(torch.nan)
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
