"""``python -m bench.beat``: what it costs a training step to be watched, and logged."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.ranks import Daemon
from ckptd.pulse import Phase, Pulse
from ckptd_client import Checkpointer
from ckptd_client.progress import Progress, figures

TURNS = 200
CALLS = 2000

Call = Callable[[int], object]
THREE: dict[str, Any] = {"loss": 1.5, "grad_norm": 0.5, "tokens": 4096}
EIGHT: dict[str, Any] = {"loss": 1.5, "grad_norm": 0.5, **{f"metric {number}": 1.5 for number in range(6)}}


def each_microseconds(call: Call) -> list[float]:
    """Of CPU for one call, in each of many turns, sorted: others that use the machine do not count. Calls get numbers
    that rise from 1."""
    found: list[float] = []
    number = 0
    for _ in range(TURNS):
        began = time.thread_time()
        for _ in range(CALLS):
            number += 1
            call(number)
        found.append((time.thread_time() - began) / CALLS * 1e6)
    return sorted(found)


def show(name: str, call: Call) -> None:
    """Best, middle and worst turn."""
    turns = each_microseconds(call)
    print(f"{name}: best {turns[0]:.2f} µs, median {turns[TURNS // 2]:.2f} µs, worst {turns[-1]:.2f} µs", flush=True)


def show_parts() -> None:
    """Without a daemon."""
    pulse = Pulse()
    progress = Progress(pulse)

    def phase(_: int) -> None:
        with pulse.phase(Phase.EVAL):
            pass

    def logged(number: int, metrics: dict[str, Any]) -> None:
        values, _ = figures(number, metrics)
        progress.report(number, number, values)

    show("a beat", lambda number: pulse.step(number, loss=1.5, grad_norm=0.5))
    show("a beat and a row of 3", lambda number: logged(number, THREE))
    show("a beat and a row of 8", lambda number: logged(number, EIGHT))
    show("a phase, begin and end", phase)
    pulse.close()


def show_whole(folder: Path, daemon: Daemon) -> None:
    """``Checkpointer.step`` as a training calls it, with no save due."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    watched = {"model": model, "optimizer": optimizer, "progress": {"tokens": 0}}
    # Where no optimizer is watched, each call is at a boundary, as it is in a training after optimizer.step().
    for name, state in (("at a boundary", {"model": model}), ("within accumulation", watched)):
        for metrics in ({}, THREE, EIGHT):
            url = str(folder / f"{name}-{len(metrics)}")
            with Checkpointer(url, state, every_steps=10**9, socket=daemon.socket, start_daemon=False) as ckpt:
                ckpt.restore()
                show(f"Checkpointer.step {name}, {len(metrics)} metrics", partial(ckpt.step, **metrics))


def main() -> None:
    """The parts, and the whole."""
    show_parts()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-")))
        show_whole(folder, stack.enter_context(Daemon(folder)))


if __name__ == "__main__":
    main()
