"""One small model, and every layout in which a world of ranks can hold it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

TOKENS = 10


class Block(nn.Module):
    """Widths that do not divide: of five rows, the last of four ranks has none."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of one batch."""
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    """Tied, frozen, without dimensions, without elements, and a counter."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 6)
        self.blocks = nn.ModuleList([Block(6, 7), Block(6, 5)])
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, TOKENS, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.void = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, target: torch.Tensor, factor: float) -> torch.Tensor:
        """The loss. What is not sharded has gradients that do not depend on the data."""
        self.steps += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(self.frozen(x)), target)
        return factor * loss + self.scale.square() + self.nothing.sum()


def _ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def _sharded(net: Net, mesh: DeviceMesh) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    # It takes no scalar, and no gradient without elements.
    return fully_shard(net, mesh=mesh, ignored_params={net.scale, net.nothing})


def _fsdp2(net: Net) -> nn.Module:
    return _sharded(net, _mesh((dist.get_world_size(),), ("all",)))


def _hsdp(net: Net) -> nn.Module:
    return _sharded(net, _mesh((2, dist.get_world_size() // 2), ("replicate", "shard")))


def _parallelized(net: Net, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(use_local_output=False),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    net.head.weight = net.embed.weight
    return net


def _tp(net: Net) -> nn.Module:
    return _parallelized(net, _mesh((dist.get_world_size(),), ("tp",)))


def _mesh2d(net: Net) -> nn.Module:
    mesh = _mesh((2, dist.get_world_size() // 2), ("dp", "tp"))
    _parallelized(net, mesh["tp"])
    return _sharded(net, mesh["dp"])


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@dataclass(frozen=True)
class Layout:
    """How a model is spread over a world."""

    build: Callable[[Net], nn.Module]
    stream: Callable[[int], int]
    """Which random numbers a rank draws: those that hold one copy together draw the same."""


LAYOUTS = {
    "single": Layout(lambda net: net, lambda rank: 0),
    "ddp": Layout(_ddp, lambda rank: rank),
    "fsdp2": Layout(_fsdp2, lambda rank: rank),
    "hsdp": Layout(_hsdp, lambda rank: rank),
    "tp": Layout(_tp, lambda rank: 0),
    "mesh2d": Layout(_mesh2d, lambda rank: rank // 2),
}


class RowsTraining:
    """One large tensor, whose rows are spread over the ranks."""

    def __init__(self, *, rows: int, row_bytes: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        whole = torch.randn(rows, row_bytes // 4)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.rows = distribute_tensor(whole, _mesh((world,), ("all",)), [Shard(0)]) if world > 1 else whole
        self.state = {"rows": self.rows}

    def step(self) -> float:
        """Nothing is trained."""
        return 0.0

    def values(self) -> dict[str, str]:
        """A digest of the whole."""
        return {"rows": digest(self.rows)}


class LayoutTraining:
    """The model, an optimizer with two groups, a scheduler, and random numbers for data."""

    def __init__(self, layout: str, *, seed: int = 0, lr: float = 0.05, warm: bool = False) -> None:
        """``warm``: one step is done, so that the optimizer has its state."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed)
        self.model = LAYOUTS[layout].build(Net())
        trained = [(name, p) for name, p in self._parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for _, p in trained if p.dim() > 1], "lr": lr, "weight_decay": lr},
                {"params": [p for _, p in trained if p.dim() < 2], "lr": lr / 3, "weight_decay": 0.0},
            ]
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        stream = seed + LAYOUTS[layout].stream(self.rank)
        torch.manual_seed(stream)
        random.seed(stream)
        np.random.seed(stream)
        if warm:
            self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self) -> float:
        """One training step."""
        data = torch.randint(0, TOKENS, (2, 4))
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(data[0], data[1], random.random() + float(np.random.rand()))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix("module."), parameter

    def values(self) -> dict[str, str]:
        """A digest of every value, whole, by name. All ranks call it together."""
        found: dict[str, object] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            found["model/" + name.removeprefix("module.")] = tensor
        for name, tensor in self.model.named_buffers():
            found["model/" + name.removeprefix("module.")] = tensor
        names = {id(parameter): name for name, parameter in self._parameters()}
        for group in self.optimizer.param_groups:
            fields = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                name = names[id(parameter)]
                found[f"group/{name}"] = fields
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    found[f"state/{name}/{key}"] = value
        found["scheduler"] = self.scheduler.state_dict()
        return {name: digest(value) for name, value in found.items()}


def training(layout: str, **options: Any) -> LayoutTraining | RowsTraining:
    """``rows``, or one of the layouts."""
    return RowsTraining(**options) if layout == "rows" else LayoutTraining(layout, **options)


def digest(value: object) -> str:
    """Of a value in every bit; of a tensor, whole."""
    found = hashlib.blake2b(digest_size=8)
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        whole = whole.detach().contiguous()
        found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
        value = (str(whole.dtype), tuple(whole.shape))
    found.update(repr(value).encode())
    return found.hexdigest()


def generators() -> dict[str, str]:
    """A digest of each of this process's generators."""
    numpy: Any = np.random.get_state(legacy=True)
    return {
        "python": digest(random.getstate()),
        "numpy": digest((numpy[1].tolist(), *numpy[2:])),
        "torch": digest(torch.get_rng_state()),
    }
