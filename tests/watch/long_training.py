"""Two ranks of a real training with slow evaluations and compiles among its steps, and a hang at its end:
``RANK=… python -m tests.watch.long_training '{"url": …}'``."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client import Checkpointer

WIDTH = 8


class Training:
    """A model that is compiled, and a sum over the ranks in each step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.compile(0)

    def compile(self, number: int) -> None:
        """Anew, and really: for batches of a length that there was not yet."""
        self._batch = torch.randn(32 + number, WIDTH)
        self._loss = torch.compile(self._squares, dynamic=False)
        self._loss(self._batch).backward()  # which is compiled when it is first needed

    def _squares(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).square().mean()

    def step(self) -> float:
        """One step of all ranks."""
        self.optimizer.zero_grad()
        loss = self._loss(self._batch)
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return loss.item()


def main(options: dict[str, Any]) -> None:
    """Train, evaluate on rank 0 while rank 1 waits in the next step's sum, compile on both; and hang."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training, rank = Training(), dist.get_rank()
    state = {"model": training.model, "optimizer": training.optimizer}
    with Checkpointer(options["url"], state, every_steps=100, socket=options["socket"], start_daemon=False) as ckpt:
        ckpt.restore()
        for step in range(1, options["steps"] + 1):
            loss = training.step()
            ckpt.step(step, loss=loss)
            if step in options["compiles"]:
                with ckpt.phase("compile"):
                    training.compile(step)
                print(f"compiled at {step}", flush=True)
            if step in options["evals"] and rank == 0:
                with ckpt.phase("eval"):
                    time.sleep(options["eval_seconds"])
        print(f"hanging after {options['steps']}", flush=True)
        if rank == 1:
            time.sleep(3600)  # and rank 0 waits for it
        training.step()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(json.loads(sys.argv[1]))
