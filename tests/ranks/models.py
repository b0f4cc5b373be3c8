"""Small models under each kind of parallelism that torch has, for workers that are in a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


class Net(nn.Module):
    """Rows that no number of ranks divides, a normalization with running statistics, and a frozen parameter."""

    def __init__(self, width: int, *, norm: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 8)
        self.norm = nn.BatchNorm1d(2 * width + 8) if norm else nn.Identity()
        self.down = nn.Linear(2 * width + 8, width)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        y: torch.Tensor = self.down(torch.relu(self.norm(self.up(x))))
        scale = self.scale.to_local() if isinstance(self.scale, DTensor) else self.scale
        return y * scale


def _stack(width: int, layers: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[Net(width, **options) for _ in range(layers)])


def _plain(width: int, layers: int) -> nn.Module:
    return _stack(width, layers)


def _ddp(width: int, layers: int) -> nn.Module:
    return DistributedDataParallel(_stack(width, layers))


def _checkpointed(width: int, layers: int) -> nn.Module:
    model = _stack(width, layers, norm=False)
    for i, layer in enumerate(model):
        model[i] = checkpoint_wrapper(layer)
    return torch.compile(DistributedDataParallel(model), backend="eager")  # type: ignore[return-value]


def _fsdp2(width: int, layers: int) -> nn.Module:
    model = _stack(width, layers)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(width: int, layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = _stack(width, layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


_TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _tp(width: int, layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _stack(width, layers, norm=False)
    for layer in model:
        parallelize_module(layer, mesh, _TENSOR_PARALLEL)
    return model


def _fsdp_tp(width: int, layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _stack(width, layers, norm=False)
    for layer in model:
        parallelize_module(layer, mesh["tp"], _TENSOR_PARALLEL)
        scale = distribute_tensor(layer.scale.detach(), mesh["tp"], [Replicate()])
        layer.scale = nn.Parameter(scale, requires_grad=False)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _fsdp1(width: int, layers: int, **options: Any) -> nn.Module:
    model = _stack(width, layers)
    for i, layer in enumerate(model):
        options.setdefault("use_orig_params", True)
        layer.scale.requires_grad_(options["use_orig_params"] is False)  # a flat parameter is trained or not
        model[i] = FullyShardedDataParallel(layer, device_id=CPU, **options)
    return FullyShardedDataParallel(model, device_id=CPU, **options)


def _fsdp1_flat(width: int, layers: int) -> nn.Module:
    return _fsdp1(width, layers, use_orig_params=False)


def _fsdp1_hybrid(width: int, layers: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp1(width, layers, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def _fsdp1_unsharded(width: int, layers: int) -> nn.Module:
    return _fsdp1(width, layers, sharding_strategy=ShardingStrategy.NO_SHARD)


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "plain": _plain,
    "ddp": _ddp,
    "zero": _ddp,
    "checkpointed": _checkpointed,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp_tp": _fsdp_tp,
    "fsdp1": _fsdp1,
    "fsdp1_flat": _fsdp1_flat,
    "fsdp1_hybrid": _fsdp1_hybrid,
    "fsdp1_unsharded": _fsdp1_unsharded,
}


class ParallelTraining:
    """A model under one kind of parallelism that trains on random numbers, other ones on each rank of a data group."""

    def __init__(self, kind: str, *, width: int, layers: int) -> None:
        self.kind = kind
        self.model = KINDS[kind](width, layers)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer
        if kind == "zero":
            self.optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01)
        else:
            self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.width = width
        self.steps = 0
        together = dist.get_rank() // 2 if kind == "fsdp_tp" else 0 if kind == "tp" else dist.get_rank()
        self.numbers = torch.Generator().manual_seed(together)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> float:
        """One training step."""
        loss = self.model(torch.randn(8, self.width, generator=self.numbers)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor as torch gathers it, under the names under which it is saved."""
        if self.kind.startswith("fsdp1"):
            return self._whole_flat()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        optimizers = () if self.kind == "zero" else (self.optimizer,)
        model, optimizer = get_state_dict(self.model, optimizers, options=options)
        found = {f"model/{name}": value for name, value in model.items() if isinstance(value, torch.Tensor)}
        for name, entry in optimizer.get("state", {}).items():
            found |= {f"optimizer/state/{name}/{field}": value for field, value in entry.items()}
        return found

    def _whole_flat(self) -> dict[str, torch.Tensor]:
        """The same for FSDP's flat parameters, whose own way to be gathered needs a GPU."""
        found: dict[str, torch.Tensor] = {}
        for path, module in self.model.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            flat, prefix = module._handle.flat_param, _without_wrappers(path)
            found |= {f"model/{prefix}{name}": value for name, value in _split(module, flat._local_shard).items()}
            state = self.optimizer.state
            for field in ("exp_avg", "exp_avg_sq"):
                shard = torch.zeros_like(flat._local_shard)
                parts = [flat] if flat._params is None else flat._params
                for part in parts:
                    if field in state.get(part, {}):
                        start = (part.data_ptr() - flat._local_shard.data_ptr()) // part.element_size()
                        shard[start : start + part.numel()] = state[part][field].flatten()
                trained = {name: value for name, value in _split(module, shard).items() if value.any()}
                found |= {f"optimizer/state/{prefix}{name}/{field}": value for name, value in trained.items()}
                found |= {f"optimizer/state/{prefix}{name}/step": torch.tensor(float(self.steps)) for name in trained}
        for path, buffer in self.model.named_buffers():
            found[f"model/{_without_wrappers(path)[:-1]}"] = buffer
        return found


def _without_wrappers(path: str) -> str:
    name = path.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module")
    return f"{name}." if name else ""


def _split(module: Any, shard: torch.Tensor) -> dict[str, torch.Tensor]:
    """The original parameters in all shards of a flat one."""
    flat = module._handle.flat_param
    shards = [shard]
    if module.sharding_strategy is not ShardingStrategy.NO_SHARD:
        shards = [torch.empty_like(shard) for _ in range(module.process_group.size())]
        dist.all_gather(shards, shard.detach(), group=module.process_group)
    whole = torch.cat(shards)[: sum(flat._numels_with_padding)]
    pieces = zip(whole.split(flat._numels_with_padding), flat._is_padding_mask, strict=True)
    values = [piece for piece, padding in pieces if not padding]
    return {
        name: value.view(shape).clone() for name, value, shape in zip(flat._fqns, values, flat._shapes, strict=True)
    }
