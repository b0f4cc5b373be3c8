"""A training in a process of its own, to be killed: ``python -m tests.client.training_process '{"url": …}'``.

Prints one JSON line for each thing that happens, so that whoever started it can act at the right moment.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from typing import Any

import torch

from ckptd_client import Checkpointer
from tests.client.conftest import Training


def tell(event: str, **fields: Any) -> None:
    """One line on standard output."""
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    """Train as the options in the first argument say."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    training = Training(width=options.get("width", 64), layers=options.get("layers", 3), seed=options.get("seed", 0))
    ckpt = Checkpointer(
        options["url"],
        training.state,
        every_steps=options.get("every_steps", 1),
        socket=options["socket"],
        **options.get("options", {}),
    )
    first = 1
    if options.get("restore", True):
        start = ckpt.restore()
        first = start.step + 1
        tell(
            "restored", step=start.step, source=start.source, generation=start.generation, notices=start.report.notices
        )
    for step in range(first, options["steps"] + 1):
        loss = training.step()
        bad = step >= options.get("bad_from", math.inf)
        save = ckpt.step(step, loss=math.nan if bad else loss)
        tell("step", step=step, loss=loss.hex(), rank=ckpt.rank)
        if save is not None:
            if "wait" in options:
                save.wait(options["wait"], timeout=60)
            tell("saved", step=step, state=save.state)
        if step == options.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(options.get("pause_seconds", 0.0))
    if options.get("close", True):
        ckpt.close(60)
    tell("end", weights=[parameter.sum().item().hex() for parameter in training.model.parameters()])


if __name__ == "__main__":
    main()
