"""A training in which every number is the step: whatever mixes two steps is seen at once."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from ckptd.checkpoint.retention import Keep
from ckptd.errors import CkptdError, SaveError
from ckptd_client import Checkpointer, Stopped
from ckptd_client.save import Save

ERROR_STATUS = 3
CLOSE_SECONDS = 120.0
LOOK_SECONDS = 0.005


class _Filling(torch.optim.Optimizer):
    """Sets every parameter, and what it keeps for it, to the number of its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(self.steps)
            self.state[parameter].setdefault("moment", torch.zeros_like(parameter)).fill_(self.steps)


class Stepped:
    """A model, its optimizer, plain tensors and plain values, all of one step."""

    def __init__(self, tensors: int, elements: int) -> None:
        self.model = torch.nn.ParameterList([torch.zeros(elements) for _ in range(tensors)])
        self.optimizer = _Filling(self.model.parameters())
        self.counters = {"step": 0, "seen": [0, 0], "tensor": torch.zeros(1000)}
        self._fill(0)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "counters": self.counters}

    def train(self, step: int) -> None:
        """A training step."""
        self._fill(step)

    def _fill(self, step: int) -> None:
        self.optimizer.steps = step
        self.optimizer.step()
        tensor: Any = self.counters["tensor"]
        tensor.fill_(step)
        self.counters["step"] = step
        self.counters["seen"] = [step, step]

    def steps_found(self) -> list[float]:
        """Every number that occurs, once."""
        found: set[float] = {float(self.counters["step"]), *map(float, self.counters["seen"])}  # type: ignore[arg-type,call-overload]
        tensors = [*self.model.parameters(), self.counters["tensor"]]
        tensors += [held["moment"] for held in self.optimizer.state.values()]
        for tensor in tensors:
            found.update(torch.unique(tensor.detach()).tolist())  # type: ignore[attr-defined]
        return sorted(found)


class InStep:
    """Ranks that wait for each other after each step, as the collectives of a training make them."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        """``path``: of a file that all of them share."""
        self._rank, self._world = rank, world
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.ftruncate(file.fileno(), mmap.PAGESIZE)
            self._words = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    def done(self, step: int) -> None:
        """This rank's step; on return it is that of all."""
        self._words[self._rank] = step
        while min(self._words[: self._world]) < step:
            time.sleep(LOOK_SECONDS)


def train(config: dict[str, Any], tell: Callable[..., None]) -> int:
    """Restore, then train and save as configured, telling of everything. The exit status."""
    training = Stepped(config["tensors"], config["elements"])
    try:
        ckpt = _checkpointer(config, training)
        restored = ckpt.restore()
    except CkptdError as error:
        tell("refused", error=type(error).__name__, message=str(error)[:1500])
        return ERROR_STATUS
    version = restored.version
    tell(
        "restored",
        step=restored.step,
        generation=restored.generation,
        of=version.generation if version is not None else 0,
        source=restored.source,
        found=training.steps_found(),
        decision=restored.decision[:1500],
    )
    saves = _Saves(config, tell)
    in_step = InStep(config["in_step"], config["rank"], config["world"]) if config["in_step"] else None
    step = restored.step
    try:
        for step in range(restored.step + 1, restored.step + config["steps"] + 1):
            training.train(step)
            saves.add(ckpt.step(step))
            time.sleep(config["pause_seconds"])
            if in_step is not None:
                in_step.done(step)
    except Stopped as stopped:
        step = stopped.step
    with contextlib.suppress(SaveError):  # it is reported like any other
        ckpt.close(CLOSE_SECONDS)
    saves.report()
    tell("end", step=step, pid=os.getpid())
    return 0


def _checkpointer(config: dict[str, Any], training: Stepped) -> Checkpointer:
    return Checkpointer(
        config["url"],
        training.state,
        every_steps=1,
        keep=Keep(last=config["keep"]),
        on_full=config["on_full"],
        max_wait=config["max_wait"],
        socket=config["socket"],
        storage_options=config["storage_options"],
        rank=config["rank"],
        world=config["world"],
        launch=config["launch"],
        takeover=config["takeover"],
        slots=config["slots"],
        start_daemon=config["start_daemon"],
        stop_on=["SIGTERM"],
    )


class _Saves:
    """Those that are not done yet, and what was told of them."""

    def __init__(self, config: dict[str, Any], tell: Callable[..., None]) -> None:
        self._wait = config["wait"]
        self._tell = tell
        self._told: dict[int, str] = {}
        self._open: list[Save] = []

    def add(self, save: Save | None) -> None:
        """Tell of it, after a wait where that is configured."""
        if save is None:
            return
        self._open.append(save)
        self.report()
        self._tell("step", step=save.step)
        if self._wait:
            with contextlib.suppress(CkptdError):  # it is reported like any other
                save.wait(self._wait, timeout=1)
            self.report()

    def report(self) -> None:
        """Tell what has changed."""
        for save in list(self._open):
            if self._told.get(save.step) != save.state:
                self._told[save.step] = save.state
                self._tell(
                    "save",
                    step=save.step,
                    generation=save.version.generation,
                    state=save.state,
                    error=type(save.error).__name__ if save.error else "",
                    message=str(save.error or "")[:500],
                    waited_seconds=save.stats.wait_seconds,
                )
            if save.done:
                self._open.remove(save)
                del self._told[save.step]
