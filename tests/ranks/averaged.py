"""Trainings that keep more than a model and its optimizer: running statistics, and an average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.ranks.flat import KINDS, FlatTraining, Net, gathered_parameters
from tests.ranks.layouts import digest

WEIGHT = 0.25
"""Of the newest weights in the average."""


class NormedNet(Net):
    """Its statistics are what each rank has seen: neither FSDP makes them equal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.frozen(self.norm(x)) + self.bias)
        return found.square().mean()


class AveragedTraining(FlatTraining):
    """``norm``: with running statistics. ``averaged``: with an average of the weights, a ``module`` that is spread as
    the model is, or a plain ``dict`` of what this rank holds of each parameter."""

    def __init__(self, kind: str, *, averaged: str, norm: bool, warm: bool = False, **options: Any) -> None:
        self._norm = norm
        super().__init__(kind, **options)
        self.average: nn.Module | None = None
        self.shadow: dict[str, torch.Tensor] = {}
        self.counted = {"updates": 0}
        if averaged == "module":
            before = torch.get_rng_state()
            torch.manual_seed(options.get("seed", 0))
            self.average = self.make("single" if kind == "ddp" else kind).requires_grad_(False)
            torch.set_rng_state(before)
        elif averaged == "dict":
            self.shadow = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        if warm:
            self.step()

    def make(self, kind: str) -> nn.Module:
        """See :meth:`FlatTraining.make`."""
        return KINDS[kind](NormedNet() if self._norm else Net())

    @property
    def state(self) -> dict[str, Any]:
        found = super().state
        if self.average is not None:
            found |= {"average": self.average, "counted": self.counted}
        if self.shadow:
            found |= {"shadow": self.shadow, "counted": self.counted}
        return found

    @torch.no_grad()
    def _average(self) -> None:
        self.counted["updates"] += 1
        weight = max(WEIGHT, 1 / self.counted["updates"])
        if self.average is not None:
            for mine, other in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(other.detach(), weight)
        for name, parameter in self.model.named_parameters():
            if name in self.shadow:
                self.shadow[name].lerp_(parameter.detach(), weight)

    def step(self) -> float:
        """One training step."""
        loss = super().step()
        self._average()
        return loss

    def values(self) -> dict[str, str]:
        """See :meth:`FlatTraining.values`. What a rank has of its own is told by rank."""
        found = super().values()
        if self.average is not None:
            found |= {f"average/{name}": digest(value) for name, value in _parameters(self.average)}
        if "counted" in self.state:
            found["counted"] = digest(self.counted)
        own = {f"buffer/{name}": digest(value) for name, value in self.model.named_buffers()}
        own |= {f"shadow/{name}": digest(value) for name, value in self.shadow.items()}
        of_ranks: list[Any] = [own]
        if dist.is_initialized():
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, own)
        return found | {f"{rank}/{name}": value for rank, own in enumerate(of_ranks) for name, value in own.items()}


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        yield from gathered_parameters(model)
    else:
        yield from model.named_parameters(remove_duplicate=False)
