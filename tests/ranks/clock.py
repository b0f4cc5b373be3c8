"""A process whose clock is wrong: ``python -m tests.ranks.clock FILE PYTHON -m MODULE ARGUMENTS…``."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path


def follow(file: Path) -> Callable[[], None]:
    """From now on this process's clock is ahead by the seconds that stand in a file, also where these change. Returns
    what puts it right. A stand-in: a single process cannot have another clock than its machine."""
    right, right_ns = time.time, time.time_ns

    def ahead() -> float:
        return float(file.read_text())

    def put_right() -> None:
        time.time, time.time_ns = right, right_ns

    time.time = lambda: right() + ahead()
    time.time_ns = lambda: right_ns() + round(ahead() * 1e9)
    return put_right


if __name__ == "__main__":
    file, _, _, module, *arguments = sys.argv[1:]
    follow(Path(file))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
