"""``python -m bench.ranks_member SETTINGS``: one rank of :mod:`bench.ranks`. Reads the number of each step to save."""

from __future__ import annotations

import json
import sys

import torch

from bench.ranks import TENSORS
from ckptd_client import Checkpointer, Keep

SAVE_SECONDS = 120.0


def main() -> None:
    """Save whatever step is asked for, until nothing more is."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    count = max(settings["bytes"] // 4 // TENSORS, 1)
    state = {f"tensor{number}": torch.full((count,), float(settings["rank"])) for number in range(TENSORS)}
    with Checkpointer(
        settings["url"],
        {"state": state},
        rank=settings["rank"],
        world=settings["world"],
        launch=settings["launch"],
        socket=settings["socket"],
        overlap=False,
        keep=Keep(last=2),
        on_error="raise",
    ) as checkpointer:
        checkpointer.restore()
        print("ready", flush=True)
        for line in sys.stdin:
            for tensor in state.values():
                tensor += 1
            checkpointer.save(int(line)).wait("committed", timeout=SAVE_SECONDS)
            print("committed", flush=True)


if __name__ == "__main__":
    main()
