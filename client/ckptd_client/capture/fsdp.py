"""The first FSDP, ``FullyShardedDataParallel``: the parameters of a module in flat buffers, each cut over the ranks.

Its own state dict gathers them. Here they are read as they lie: of each original parameter the range of elements that
this rank has, without the padding between parameters and at the end.
"""

# torch keeps how a flat parameter is made up to itself
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptd_client.capture.flat import FlatSlice, FlatViews

Place = tuple[nn.Module, str]
"""The module that has an original parameter, and the parameter's name in it."""


def is_fsdp(module: nn.Module) -> bool:
    """Whether the module is a ``FullyShardedDataParallel``. Imports nothing."""
    found = sys.modules.get("torch.distributed.fsdp")
    return found is not None and isinstance(module, found.FullyShardedDataParallel)


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """One flat parameter of a wrapped module, and what this rank holds of it."""

    parameter: nn.Parameter
    slices: tuple[FlatSlice, ...]
    """In the order of the original parameters; named by their place only."""
    places: tuple[Place, ...]
    originals: tuple[nn.Parameter, ...]
    """The original parameters, where the optimizer has these (``use_orig_params=True``)."""
    shared: tuple[tuple[Place, int], ...]
    """Further places of the same parameter, and the number of its slice."""
    group: tuple[int, ...]
    """Ranks that hold the same shard."""
    views: FlatViews

    def pieces(self) -> list[torch.Tensor]:
        """What this rank holds of each original parameter, flat."""
        local = getattr(self.parameter, "_local_shard", None)  # there is none before the first forward
        return self.views.of(self.parameter if local is None else local, self.slices)


def flat_parameter(module: nn.Module) -> FlatParameter | None:
    """Of a wrapped module; ``None`` where it has no parameters of its own. Asks no other rank."""
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return None
    flat = handle.flat_param
    slices: list[FlatSlice] = []
    for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        if info.in_shard:
            start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
            slices.append(FlatSlice(name, tuple(shape), start, stop, info.offset_in_shard))
        else:
            slices.append(FlatSlice(name, tuple(shape), 0, 0, 0))
    places = {(id(info.module), info.param_name): i for i, info in enumerate(flat._param_infos)}
    shared = tuple(
        ((info.module, info.param_name), places[id(info.prim_module), info.prim_param_name])
        for info in flat._shared_param_infos
    )
    return FlatParameter(
        flat,
        tuple(slices),
        tuple((info.module, info.param_name) for info in flat._param_infos),
        tuple(flat._params or ()),
        shared,
        _same_shard(module),
        FlatViews(),
    )


def buffer_dtypes(module: nn.Module) -> dict[int, tuple[torch.dtype, torch.dtype]]:
    """By the id of a buffer that FSDP turns to a lower precision in its first forward: the dtype that it had before,
    and the one that it has from then on."""
    found: dict[int, tuple[torch.dtype, torch.dtype]] = {}
    for wrapper in filter(is_fsdp, module.modules()):  # the inner ones last, as theirs counts
        _add_buffer_dtypes(wrapper, found)
    return found


def _add_buffer_dtypes(wrapper: Any, found: dict[int, tuple[torch.dtype, torch.dtype]]) -> None:
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    lower = wrapper.mixed_precision.buffer_dtype
    for own_name, buffer in wrapper.named_buffers():
        name = clean_tensor_name(own_name)
        found.pop(id(buffer), None)
        if lower is not None and buffer.is_floating_point() and name not in wrapper._ignored_buffer_names:
            found[id(buffer)] = (wrapper._buffer_name_to_orig_dtype.get(name, buffer.dtype), lower)


def _same_shard(module: Any) -> tuple[int, ...]:
    """Hybrid sharding repeats each shard on every node; without any, each rank of the group holds everything."""
    from torch.distributed.fsdp import ShardingStrategy

    strategy = module.sharding_strategy
    if strategy is ShardingStrategy.NO_SHARD:
        return _ranks(module.process_group)
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        return _ranks(module._inter_node_pg)
    return (dist.get_rank(),)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
