"""Trainings whose state lies in flat buffers, and the other layouts that theirs is taken to and from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckptd_client import FlatPartition, FlatSlice
from tests.ranks.layouts import digest

CPU = torch.device("cpu")
TOKENS = 9
PADDING = 77.0
"""In every place of a flat buffer that is nobody's."""


class Block(nn.Module):
    """Tensors of 7 and of 13 elements, whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.rand(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of one batch."""
        y: torch.Tensor = self.down(torch.tanh(self.up(x)) * self.scale)
        return x + y


class Net(nn.Module):
    """Two blocks, a frozen layer, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.bias = nn.Parameter(torch.rand(7))
        self.head = nn.Linear(7, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.frozen(x) + self.bias)
        return found.square().mean()


def _ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def _fsdp2(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*net.blocks, net.frozen):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _dp_tp(net: Net) -> nn.Module:
    """Tensor parallelism has only the blocks' layers: ranks of one group hold equal parts of all else, and nothing says
    so."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net.frozen, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def _fsdp1(net: Net, **options: Any) -> nn.Module:
    options = {"device_id": CPU, "use_orig_params": True, **options}
    for number, block in enumerate(net.blocks):
        net.blocks[number] = FullyShardedDataParallel(block, **options)
    net.frozen = FullyShardedDataParallel(net.frozen, **options)
    return FullyShardedDataParallel(net, **options)


def _hybrid(net: Net, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp1(net, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **options)


def _unsharded(net: Net, **options: Any) -> nn.Module:
    return _fsdp1(net, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


def _grad_op(net: Net, **options: Any) -> nn.Module:
    return _fsdp1(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, **options)


HALF = {
    "mixed_precision": MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
    )
}
"""Computed in bfloat16, running statistics too; kept and reduced in single precision."""


KINDS: dict[str, Callable[[Net], nn.Module]] = {
    "single": lambda net: net,
    "ddp": _ddp,
    "zero": _ddp,
    "fsdp2": _fsdp2,
    "dp_tp": _dp_tp,
    "fsdp1": _fsdp1,
    "fsdp1_flat": lambda net: _fsdp1(net, use_orig_params=False),
    "hybrid": _hybrid,
    "hybrid_flat": lambda net: _hybrid(net, use_orig_params=False),
    "unsharded": _unsharded,
    "unsharded_flat": lambda net: _unsharded(net, use_orig_params=False),
    "grad_op": _grad_op,
    "half": lambda net: _fsdp1(net, **HALF),
    "half_flat": lambda net: _fsdp1(net, use_orig_params=False, **HALF),
    "half_unsharded": lambda net: _unsharded(net, **HALF),
    "half_hybrid": lambda net: _hybrid(net, **HALF),
}


class FlatTraining:
    """The model and AdamW in one kind of layout; draws its data from the rank's own generator."""

    def __init__(self, kind: str, *, seed: int = 0, lr: float = 0.05, warm: bool = False, groups: bool = False) -> None:
        """``warm``: one step is done, so that the optimizer has its state. ``groups``: two of them."""
        self.kind = kind
        torch.manual_seed(seed)
        self.model = self.make(kind)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        given: list[Any] = trained
        if groups:
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            biases = [p for name, p in named if name.endswith("bias")]
            others = [p for name, p in named if not name.endswith("bias")]
            given = [{"params": biases, "weight_decay": lr}, {"params": others, "lr": lr / 2}]
        self.optimizer: torch.optim.Optimizer
        if kind == "zero":
            self.optimizer = ZeroRedundancyOptimizer(given, torch.optim.AdamW, lr=lr)
        else:
            self.optimizer = torch.optim.AdamW(given, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(seed + (rank // 2 if kind == "dp_tp" else rank))
        if warm:
            self.step()
        self._spoil_padding()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def make(self, kind: str) -> nn.Module:
        """A model in that layout."""
        return KINDS[kind](Net())

    def step(self) -> float:
        """One training step."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.randint(0, TOKENS, (8,)))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self._spoil_padding()
        return loss.item()

    # What there is, as torch gathers it

    def values(self) -> dict[str, str]:
        """A digest of every value, whole, by name. All ranks call it together."""
        found: dict[str, object] = dict(self._gathered())
        for number, group in enumerate(self.optimizer.param_groups):
            found[f"group/{number}"] = {key: value for key, value in group.items() if key != "params"}
        found["scheduler"] = self.scheduler.state_dict()
        return {name: digest(value) for name, value in found.items()}

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        if any(isinstance(module, FullyShardedDataParallel) for module in self.model.modules()):
            yield from self._gathered_flat()
            return
        names: dict[int, str] = {}
        for own, parameter in self.model.named_parameters(remove_duplicate=False):
            name = own.removeprefix("module.")
            yield f"model/{name}", parameter
            names.setdefault(id(parameter), name)
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            yield from self._gathered_parts(names)
            return
        for parameter, entry in self.optimizer.state.items():
            for field, value in entry.items():
                yield f"state/{names[id(parameter)]}/{field}", value

    def _gathered_parts(self, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
        own = {names[id(p)]: entry for p, entry in self.optimizer.optim.state.items()}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        for name in names.values():
            having = [entries[name] for entries in of_ranks if name in entries]
            assert len(having) <= 1
            for entry in having:
                for field, value in entry.items():
                    yield f"state/{name}/{field}", value

    def _gathered_flat(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in gathered_parameters(self.model):
            yield f"model/{name}", value
        for prefix, module in _flat_modules(self.model):
            if module._handle.flat_param.requires_grad:
                yield from self._gathered_state(module, prefix)

    def _gathered_state(self, module: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        flat, state = module._handle.flat_param, self.optimizer.state
        shard = _shard_of(flat)
        pieces = [flat] if flat._params is None else flat._params
        counts = [float(state[piece]["step"]) for piece in pieces if piece in state]
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, counts)
        found = {count for of_rank in steps for count in of_rank}
        if not found:
            return
        assert len(found) == 1
        for field in ("exp_avg", "exp_avg_sq"):
            made = torch.full_like(shard, torch.nan)
            for piece in pieces:
                if piece in state and piece.numel():
                    at = (piece.data_ptr() - shard.data_ptr()) // piece.element_size()
                    made[at : at + piece.numel()] = state[piece][field].flatten()
            for name, value in _whole(module, made).items():
                yield f"state/{prefix}{name}/{field}", value
                yield f"state/{prefix}{name}/step", torch.tensor(found.copy().pop())

    def _spoil_padding(self) -> None:
        """What is in no tensor of a flat parameter gets a value that would be seen anywhere else."""
        for _, module in _flat_modules(self.model):
            flat = module._handle.flat_param
            free = torch.ones_like(_shard_of(flat), dtype=torch.bool)
            for info in flat._shard_param_infos:
                if info.in_shard:
                    free[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard] = False
            _shard_of(flat)[free] = PADDING
            for field, value in self.optimizer.state.get(flat, {}).items():
                if field != "step":
                    value[free] = PADDING


def gathered_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a model that FSDP1 wraps, whole, by each of its names."""
    for prefix, module in _flat_modules(model):
        flat = module._handle.flat_param
        whole = _whole(module, _shard_of(flat))
        for name, value in whole.items():
            yield f"{prefix}{name}", value
        for info in flat._shared_param_infos:
            first = f"{info.prim_module_name}.{info.prim_param_name}"
            yield f"{prefix}{info.module_name}.{info.param_name}", whole[first]


def _flat_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield _without_wrappers(path), module


def _without_wrappers(path: str) -> str:
    name = path.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module")
    return f"{name}." if name and not name.endswith(".") else name


def _shard_of(flat: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(flat, "_local_shard", flat)
    return found.detach()


def _whole(module: Any, shard: torch.Tensor) -> dict[str, torch.Tensor]:
    """The original parameters in all shards of a flat one."""
    flat = module._handle.flat_param
    shards = [shard]
    if module.sharding_strategy is not ShardingStrategy.NO_SHARD:
        shards = [torch.empty_like(shard) for _ in range(module.process_group.size())]
        dist.all_gather(shards, shard, group=module.process_group)
    line = torch.cat(shards)[: sum(flat._numels_with_padding)]
    pieces = zip(line.split(flat._numels_with_padding), flat._is_padding_mask, strict=True)
    values = [piece for piece, padding in pieces if not padding]
    return {name: value.view(shape) for name, value, shape in zip(flat._fqns, values, flat._shapes, strict=True)}


# An engine of the ZeRO kind, by hand

ALIGNED = 4
"""Each tensor begins at a multiple of so many elements of the flat line."""


class ZeroOneTraining:
    """Parameters in bfloat16 on every rank; single-precision masters and moments in a flat line, padded, of which each
    rank has an equal share. Behind ``idle`` elements at its end, which some ranks have nothing but."""

    def __init__(self, *, seed: int = 0, lr: float = 0.05, warm: bool = False, idle: int = 0) -> None:
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(seed)
        self.model = Net().bfloat16()
        self._starts: list[tuple[str, nn.Parameter, int]] = []
        end = 0
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._starts.append((name, parameter, end))
                end += -(-parameter.numel() // ALIGNED) * ALIGNED
        self.share = -(-(end + idle) // self.world)
        self.masters = FlatPartition(nn.Parameter(self._own(self._line("data"))), list(self._slices()))
        self.optimizer = torch.optim.AdamW([self.masters.buffer], lr=lr)
        torch.manual_seed(seed + self.rank)
        if warm:
            self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "masters": self.masters, "optimizer": self.optimizer}

    def _line(self, of: str) -> torch.Tensor:
        line = torch.full((self.share * self.world,), PADDING)
        for _, parameter, start in self._starts:
            line[start : start + parameter.numel()] = getattr(parameter, of).detach().flatten().float()
        return line

    def _own(self, line: torch.Tensor) -> torch.Tensor:
        return line[self.share * self.rank : self.share * (self.rank + 1)].clone()

    def _slices(self) -> Iterator[FlatSlice]:
        begin, end = self.share * self.rank, self.share * (self.rank + 1)
        for name, parameter, start in self._starts:
            first, last = max(start, begin), min(start + parameter.numel(), end)
            shape = tuple(parameter.shape)
            if first < last:
                yield FlatSlice(name, shape, first - start, last - start, first - begin)
            else:
                yield FlatSlice(name, shape, 0, 0, 0)

    def step(self) -> float:
        """Gradients of all ranks, one step of this rank's share, and the new parameters of all."""
        self.model.zero_grad()
        loss: torch.Tensor = self.model(torch.randint(0, TOKENS, (8,)))
        loss.backward()
        line = self._line("grad")
        if self.world > 1:
            dist.all_reduce(line)
        buffer = self.masters.buffer
        buffer.grad = self._own(line)
        self.optimizer.step()
        whole = self._whole(buffer)
        with torch.no_grad():
            for _, parameter, start in self._starts:
                parameter.copy_(whole[start : start + parameter.numel()].view(parameter.shape))
        return loss.item()

    def _whole(self, share: torch.Tensor) -> torch.Tensor:
        if self.world == 1:
            return share.detach()
        shares = [torch.empty_like(share) for _ in range(self.world)]
        dist.all_gather(shares, share.detach())
        return torch.cat(shares)

    def values(self) -> dict[str, str]:
        """A digest of every value, whole, by name. All ranks call it together."""
        found: dict[str, object] = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        buffer = self.masters.buffer
        state = self.optimizer.state.get(buffer, {})  # a rank with nothing but padding may have none
        for field in ("masters", "exp_avg", "exp_avg_sq"):
            whole = self._whole(buffer if field == "masters" else state.get(field, torch.full_like(buffer, torch.nan)))
            for name, parameter, start in self._starts:
                found[f"{field}/{name}"] = whole[start : start + parameter.numel()].clone()
        steps: list[Any] = [None] * self.world
        if self.world > 1:
            dist.all_gather_object(steps, state.get("step"))
        found["step"] = sorted({float(step) for step in (*steps, state.get("step")) if step is not None})
        found["group"] = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return {name: digest(value) for name, value in found.items()}


def training(kind: str, *, averaged: str = "", norm: bool = False, **options: Any) -> FlatTraining | ZeroOneTraining:
    """``zero_one``, or one of the layouts; with more beside it where that is asked for, see
    :mod:`tests.ranks.averaged`."""
    if kind == "zero_one":
        return ZeroOneTraining(**options)
    if averaged or norm:
        from tests.ranks.averaged import AveragedTraining

        return AveragedTraining(kind, averaged=averaged, norm=norm, **options)
    return FlatTraining(kind, **options)
