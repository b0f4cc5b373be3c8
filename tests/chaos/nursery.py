"""Forks trainers and daemons in no time: ``python -m tests.chaos.nursery``; see :mod:`tests.nursery`.

Each has two descriptors: where it writes its events, one JSON object a line, and the count of its points.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ckptd.checkpoint.run import Run
from ckptd.daemon import stores
from ckptd.daemon.budgets import Budgets
from ckptd.daemon.server import run as serve
from ckptd.daemon.settings import Settings
from ckptd.storage import Limits, open_backend, with_standard_wrappers
from ckptd_backends.s3 import open_s3
from ckptd_backends.wrappers import Slow
from tests.chaos.points import Counter, Points
from tests.chaos.training import Stepped, train
from tests.nursery import nurse

_preloaded = open_s3


def main() -> None:
    """Fork until the other end closes the socket."""
    torch.set_num_threads(1)
    _rehearse()
    nurse(_live)


def _rehearse() -> None:
    """What is imported and kept only when it is used first: the children have it then. No thread outlives this."""
    training = Stepped(1, 1)
    training.train(1)
    for part in (training.model, training.optimizer):
        part.load_state_dict(part.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_use(f"file://{folder}/run"))


async def _use(url: str) -> None:
    async with contextlib.aclosing(with_standard_wrappers(open_backend(url, {}), Limits())) as backend:
        run = await Run.open(backend, create=True)
        await run.committed()


def _live(config: dict[str, Any], events: int, counted: int) -> int:
    """A trainer or a daemon, to its end: the exit status."""

    def tell(event: str, **fields: Any) -> None:
        os.write(events, json.dumps({"event": event, **fields}).encode() + b"\n")  # whole, below PIPE_BUF

    try:
        log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        Points(Counter(counted), tell).put_in()
        if config["kind"] == "trainer":
            return train(config, tell)
        _slow_down(config.get("slow_seconds", 0.0))
        settings: dict[str, Any] = {"commit_takeover_seconds": 0.5, **config["settings"]}
        budgets = Budgets(**settings.pop("budgets", {}))
        return serve(Settings(socket=Path(config["socket"]), budgets=budgets, **settings))
    except BaseException as error:
        with contextlib.suppress(OSError):
            tell("broke", error=f"{type(error).__name__}: {error}"[:2000])
        raise


def _slow_down(delay_seconds: float) -> None:
    """Each store of this daemon takes its time."""
    if delay_seconds:
        stores.open_backend = lambda *args, **kwargs: Slow(  # type: ignore[assignment]
            open_backend(*args, **kwargs), delay_seconds=delay_seconds
        )


if __name__ == "__main__":
    main()
