"""A training in which every number is the step: whatever mixes two steps is seen at once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from ckptd.checkpoint.retention import Keep
from ckptd.errors import CkptdError
from ckptd_client import Checkpointer
from ckptd_client.save import Save

ERROR_STATUS = 3


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


def train(config: dict[str, Any], tell: Callable[..., None]) -> int:
    """Restore, then train and save as configured, telling of everything. The exit status."""
    training = Stepped(config["tensors"], config["elements"])
    try:
        ckpt = Checkpointer(
            config["url"],
            training.state,
            every_steps=1,
            keep=Keep(last=config["keep"]),
            max_wait=config["max_wait"],
            socket=config["socket"],
            storage_options=config["storage_options"],
            rank=config["rank"],
            world=config["world"],
            launch=config["launch"],
            takeover=config["takeover"],
        )
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
        daemon=ckpt.daemon_pid,
    )
    told: dict[int, str] = {}
    saves: list[Save] = []
    last = restored.step + config["steps"]
    for step in range(restored.step + 1, last + 1):
        training.train(step)
        save = ckpt.step(step)
        if save is not None:
            saves.append(save)
        _report(saves, told, tell)
        tell("step", step=step, daemon=ckpt.daemon_pid)
        if save is not None and config["wait"]:
            with contextlib.suppress(CkptdError):  # it is reported like any other
                save.wait(config["wait"], timeout=1)
            _report(saves, told, tell)
        time.sleep(config["pause_seconds"])
    ckpt.close(120)
    _report(saves, told, tell)
    tell("end", step=last, pid=os.getpid())
    return 0


def _report(saves: list[Save], told: dict[int, str], tell: Callable[..., None]) -> None:
    for save in list(saves):
        state = save.state
        if told.get(save.step) != state:
            told[save.step] = state
            tell("save", step=save.step, generation=save.version.generation, state=state, error=str(save.error)[:500])
        if save.done:
            saves.remove(save)
