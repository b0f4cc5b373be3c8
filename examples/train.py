"""A training script with ckptd in three lines, and the same training without it.

    python -m examples.train URL --steps 200 --every 50
    python -m examples.train --plain --steps 200

Run the first one again after whatever ended it, and it goes on where it was; when both are done, their losses and
weights are equal bit for bit. ``--events`` appends one JSON object per line: the loss of each step, each restore, each
save. Floats in it are exact.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from examples.gpt import GPT, Batches, Shape, library_text

WARMUP_STEPS = 10
DECAY_STEPS = 1000


class Log(Protocol):
    """Writes one event."""

    def __call__(self, event: str, **fields: Any) -> None:
        """``event``: which kind; ``fields``: what JSON can carry."""
        ...


class Training:
    """Model, optimizer, schedule and data: everything that a run needs to go on is in ``state`` (and in torch's
    random-number generator, which ckptd saves by itself)."""

    def __init__(self, shape: Shape, *, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor)
        self.batches = Batches(library_text(), size=batch, context=shape.context, seed=seed)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "batches": self.batches,
        }

    def step(self) -> tuple[float, float]:
        """One optimizer step. Returns the loss and the norm of its gradient."""
        self.optimizer.zero_grad()
        loss = self.model(*self.batches.take())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item(), norm.item()


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then linear decay."""
    return min((step + 1) / WARMUP_STEPS, max(1 - step / DECAY_STEPS, 0.1))


def train_plainly(training: Training, steps: int, log: Log) -> None:
    """The loop as it was before ckptd."""
    for step in range(1, steps + 1):
        began = time.monotonic()
        loss, _ = training.step()
        log("step", step=step, loss=loss, seconds=time.monotonic() - began)


def train_with_ckptd(training: Training, url: str, steps: int, every: int, log: Log) -> None:
    """The same loop with three more lines, and what this example logs of them."""
    from ckptd_client import Checkpointer, Save  # at the top in a script without --plain

    saves: list[Save] = []
    with Checkpointer(url, training.state, every_steps=every) as ckpt:  # line 1
        began = time.monotonic()
        start = ckpt.restore()  # line 2
        log("restored", step=start.step, source=start.source, seconds=time.monotonic() - began)
        for step in range(start.step + 1, steps + 1):
            began = time.monotonic()
            loss, norm = training.step()
            seconds = time.monotonic() - began
            writing = any(save.state in ("filling", "sealed") for save in saves)
            log("step", step=step, loss=loss, seconds=seconds, writing=writing)
            if save := ckpt.step(step, loss=loss, grad_norm=norm):  # line 3
                saves.append(save)
            for done in [save for save in saves if save.done]:
                saves.remove(done)
                log_save(log, done)
        ckpt.flush()
        for save in saves:
            log_save(log, save)


def log_save(log: Log, save: Any) -> None:
    """What a save cost, once it is committed, or why it failed."""
    stats = save.stats
    log(
        "save",
        step=save.step,
        state=save.state,
        error=str(save.error or ""),
        bytes=stats.bytes,
        stall_seconds=stats.stall_seconds,
        durable_seconds=stats.queue_seconds + stats.write_seconds,
        commit_seconds=stats.commit_seconds,
        path=stats.path,
    )


@contextlib.contextmanager
def open_log(path: Path | None) -> Generator[Log]:
    """Events go to ``path``, or else to standard output. Each is one append, so that a kill cuts none in two."""
    descriptor = 1 if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def log(event: str, **fields: Any) -> None:
        os.write(descriptor, json.dumps({"event": event, **fields}).encode() + b"\n")

    try:
        yield log
    finally:
        if path is not None:
            os.close(descriptor)


def final_tensors(training: Training) -> dict[str, torch.Tensor]:
    """Weights, optimizer state and random-number state under flat names."""
    found = {f"model/{name}": parameter.detach() for name, parameter in training.model.named_parameters()}
    for number, fields in training.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{number}/{name}": value for name, value in fields.items()}
    return found | {"rng": torch.get_rng_state()}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="examples.train", description="Train a small GPT with ckptd, or without.")
    parser.add_argument("url", nargs="?", help="where the run lies: file:///…, s3://bucket/prefix, or a path")
    parser.add_argument("--plain", action="store_true", help="train without ckptd")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="save after every so many steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of torch; equal runs need equal numbers")
    parser.add_argument("--events", type=Path, help="append events to this file; else to standard output")
    parser.add_argument("--final", type=Path, help="write the final weights to this .safetensors file")
    args = parser.parse_args(argv)
    if (args.url is None) is not args.plain:
        parser.error("give either a URL or --plain")
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    training = Training(Shape(layers=args.layers, width=args.width), batch=args.batch, seed=args.seed)
    with open_log(args.events) as log:
        if args.plain:
            train_plainly(training, args.steps, log)
        else:
            train_with_ckptd(training, args.url, args.steps, args.every, log)
        if args.final:
            from safetensors.torch import save_file

            save_file(final_tensors(training), args.final)
        ours = {"ckptd", "ckptd_client", "ckptd_backends"}
        log("end", imported_ckptd=any(name.split(".")[0] in ours for name in sys.modules))


if __name__ == "__main__":
    main()
