"""Trainings of ranks that differ from each other: pipeline stages, experts, values and lists of a rank's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ckptd_client.capture.flat import FlatPartition, FlatSlice
from tests.ranks.layouts import digest

LAYERS = 5


def _seeded(number: int, kind: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(number)
    return kind(*args, **options)


def _stage(rank: int, world: int, seed: int) -> nn.Module:
    """The layers of one stage under the names that they have in the whole model; the embedding is in the first, the
    head, which is tied to it, in the last."""
    model = nn.Module()
    if rank == 0:
        model.embed = _seeded(seed, nn.Embedding, 7, 6)
    layers = nn.ModuleDict()
    for number in range(LAYERS * rank // world, LAYERS * (rank + 1) // world):
        layers[str(number)] = _seeded(seed + 1 + number, nn.Linear, 6, 6)
    model.layers = layers
    if rank == world - 1:
        model.head = nn.Linear(6, 7, bias=False)
        embedding = _seeded(seed, nn.Embedding, 7, 6)
        model.head.weight = model.embed.weight if world == 1 else nn.Parameter(embedding.weight.detach())
    return model


FLAT = {"a": 7, "b": 13}
PADDED_TO = 4


def _partition(rank: int, world: int, seed: int) -> FlatPartition:
    """This rank's share of all elements, one behind the other, and padding that must go nowhere."""
    total = sum(FLAT.values())
    share = -(-total // world)
    first, last = min(share * rank, total), min(share * (rank + 1), total)
    torch.manual_seed(seed)
    everything = torch.randn(total)
    buffer = nn.Parameter(torch.full((-(-share // PADDED_TO) * PADDED_TO,), 77.0))
    with torch.no_grad():
        buffer[: last - first] = everything[first:last]
    slices: list[FlatSlice] = []
    begin = 0
    for name, size in FLAT.items():
        low, high = max(first, begin), min(last, begin + size)
        if low < high:
            slices.append(FlatSlice(name, (size,), low - begin, high - begin, low - first))
        else:
            slices.append(FlatSlice(name, (size,), 0, 0, 0))
        begin += size
    return FlatPartition(buffer, slices)


class OddTraining:
    """Trains each parameter towards zero, alone: the same parameter gets the same value wherever it is."""

    def __init__(self, kind: str, rank: int, world: int, *, seed: int = 0, **options: Any) -> None:
        self.rank, self.world = rank, world
        self.model: nn.Module
        self.state: dict[str, Any]
        self.partition: FlatPartition | None = None
        extra: dict[str, Any] = {}
        match kind:
            case "whole":  # every rank has every layer
                self.model = _stage(0, 1, seed)
            case "stages":
                self.model = _stage(rank, world, seed)
            case "experts":  # of one name, and another value on each rank
                self.model = nn.ModuleDict(
                    {"shared": _seeded(seed, nn.Linear, 3, 3), "expert": _seeded(seed + 1 + rank, nn.Linear, 3, 3)}
                )
            case "some":  # the same, but for the first rank, which has none
                self.model = nn.ModuleDict({"shared": _seeded(seed, nn.Linear, 3, 3)})
                if rank:
                    self.model["expert"] = _seeded(seed + 1 + rank, nn.Linear, 3, 3)
            case "flags":  # a buffer that differs, beside parameters that do not
                self.model = _seeded(seed, nn.Linear, 3, 3)
                self.model.register_buffer("seen", torch.full((2,), seed + rank))
            case "flat":
                self.partition = _partition(rank, world, seed)
                self.state = {"model": self.partition}
                self.optimizer = torch.optim.AdamW([self.partition.buffer], lr=0.1)
                self.state["optimizer"] = self.optimizer
                self.model = nn.ParameterList([self.partition.buffer])
                return
            case "lists":
                self.model = _seeded(seed, nn.Linear, 3, 3)
                extra["queue"] = [seed + rank] * options["lengths"][rank]
            case _:
                raise ValueError(kind)
        named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for p in named.values() if (p.dim() > 1) is matrix], "lr": lr}
            for matrix, lr in ((True, 0.1), (False, 0.02))
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"] or world > 1])
        self.state = {"model": self.model, "optimizer": self.optimizer, **extra}

    def step(self) -> float:
        """One training step."""
        total = 0.0
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            loss = parameter.square().sum()
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def values(self) -> dict[str, str]:
        """A digest of every value that this rank has."""
        return dict(self._values())

    def _flat_values(self) -> Iterator[tuple[str, str]]:
        """Each element by itself."""
        buffer = self.partition.buffer
        (group,) = self.optimizer.param_groups
        yield "group/flat", digest({key: value for key, value in group.items() if key != "params"})
        held = {"model": buffer.detach(), **{f"state/{k}": v for k, v in self.optimizer.state[buffer].items()}}
        for one in self.partition.slices:
            for number in range(one.start, one.stop):
                for where, value in held.items():
                    element = value if not value.dim() else value[one.at + number - one.start]
                    yield f"{where}/{one.name}/{number}", digest(element)

    def _values(self) -> Iterator[tuple[str, str]]:
        if self.partition is not None:
            yield from self._flat_values()
            return
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, value in self.model.state_dict().items():
            yield f"model/{name}", digest(value)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                yield f"group/{name}", digest({key: value for key, value in group.items() if key != "params"})
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    yield f"state/{name}/{key}", digest(value)
        if "queue" in self.state:
            yield "queue", digest(self.state["queue"])
