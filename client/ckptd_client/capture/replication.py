"""Data parallelism: which of a module's tensors are kept equal over which ranks."""

# torch keeps some of what is read here to itself
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd_client.capture.holdings import Known


@dataclass(frozen=True, slots=True)
class _Replication:
    """What holds below a module."""

    parameters: Known = field(default_factory=Known)
    buffers: Known = field(default_factory=Known)
    ignored: frozenset[int] = frozenset()
    """The id of each tensor that is left out."""


def replicated(module: nn.Module) -> dict[int, Known]:
    """Every tensor of a module that is kept equal over ranks, by its id."""
    found: dict[int, Known] = {}
    for inner, rule in _rules(module, _Replication(), set()):
        for tensors, known in ((inner._parameters, rule.parameters), (inner._buffers, rule.buffers)):
            if known.group:
                for tensor in tensors.values():
                    if tensor is not None and id(tensor) not in rule.ignored:
                        found[id(tensor)] = known
    return found


def _rules(module: nn.Module, above: _Replication, seen: set[int]) -> Iterator[tuple[nn.Module, _Replication]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    rule = _rule_of(module) or above
    yield module, rule
    for child in module._modules.values():
        if child is not None:
            yield from _rules(child, rule, seen)


def _rule_of(module: nn.Module) -> _Replication | None:
    """What this very module begins."""
    if isinstance(module, DistributedDataParallel):
        replica: Any = module
        group = _ranks(replica.process_group)
        names = cast("set[str]", replica.parameters_to_ignore)
        inner = cast(nn.Module, replica.module)
        return _Replication(
            Known(group),
            # Of buffers the first rank's are sent to all before the next forward.
            Known(group, led=True) if replica.broadcast_buffers else Known(),
            frozenset(id(tensor) for name, tensor in _named(inner) if name in names),
        )
    return _composable(module)


def _composable(module: nn.Module) -> _Replication | None:
    """``replicate()``, which leaves the module's class as it is."""
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None or "replicate" not in (composable._get_registry(module) or ()):
        return None
    state: Any = composable.replicate.state(module)
    if state is None:
        return None
    if state.has_initialized:
        group = _ranks(state._ddp.process_group)
        of_it = {id(parameter) for parameter in state._param_list}
        return _Replication(Known(group), ignored=_all_but(module.parameters(), of_it))
    arguments = state._init_kwargs
    if arguments.get("device_mesh") is not None:
        group = _ranks(arguments["device_mesh"].get_group())
    else:
        group = _ranks(arguments.get("process_group"))
    left_out = state._init_args[1] if len(state._init_args) > 1 else ()
    return _Replication(Known(group), ignored=frozenset(id(p) for other in left_out for p in other.parameters()))


def _all_but(tensors: Iterable[torch.Tensor], kept: set[int]) -> frozenset[int]:
    return frozenset(id(tensor) for tensor in tensors if id(tensor) not in kept)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
