"""Rank 1 of the run that is damaged: ``python -m tests.hostile.saving URL SOCKET``. Rank 0 is the test itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ckptd_client import Checkpointer

OLD, NEW = 10, 20
TENSORS = 90
LONG_NAME = "x" * 3500
"""So that few tensors make an index of several parts."""


def new_state() -> dict[str, Any]:
    """All zeros."""
    return {"model": {f"{LONG_NAME}{i}": torch.zeros(50) for i in range(TENSORS)}, "more": {"step": 0}}


def fill(state: dict[str, Any], step: int) -> None:
    """Every number tells the step, and where it stands."""
    for number, tensor in enumerate(state["model"].values()):
        tensor.fill_(100 * step + number)
    state["more"]["step"] = step


def save_as(rank: int, url: str, socket: Path) -> None:
    """Both checkpoints, as one of two ranks."""
    state = new_state()
    with Checkpointer(
        url, state, rank=rank, world=2, launch="launch#0", socket=socket, replicated=True, rng=False
    ) as ckpt:
        ckpt.restore()
        for step in (OLD, NEW):
            fill(state, step)
            ckpt.save(step, pin=step == NEW).wait(timeout=60)


if __name__ == "__main__":
    save_as(1, sys.argv[1], Path(sys.argv[2]))
