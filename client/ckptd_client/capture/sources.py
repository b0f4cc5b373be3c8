"""Which source captures and restores a value, and what the sources of a state say of its parameters."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ckptd.format.tree import Path
from ckptd_client.capture.flat import FlatPartition, FlatSlice, FlatSource
from ckptd_client.capture.module import ModuleSource
from ckptd_client.capture.objects import ObjectSource, keeps_state
from ckptd_client.capture.optimizer import OptimizerSource, is_plain_optimizer, partitioned_optimizer
from ckptd_client.capture.scaler import ScalerSource, is_scaler
from ckptd_client.capture.walk import FlatParameters, ParameterNames, Source


def make_source(value: object, path: Path) -> Source | None:
    """The source of an object with a state of its own; ``None`` for any other value."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, nn.Module):
        return ModuleSource(value, path)
    if isinstance(value, FlatPartition):
        return FlatSource(value, path)
    inner = partitioned_optimizer(value)
    if inner is not None:
        return OptimizerSource(inner, path, shared_out_by=cast(torch.optim.Optimizer, value))
    if is_plain_optimizer(value):
        return OptimizerSource(cast(torch.optim.Optimizer, value), path)
    if is_scaler(value):
        return ScalerSource(cast(GradScaler, value), path)
    return ObjectSource(value, path) if keeps_state(value) else None


def parameter_names(modules: list[tuple[Path, ModuleSource]]) -> ParameterNames:
    """The first name of each parameter, and where its module is."""
    names: dict[int, tuple[Path, str]] = {}
    for path, source in modules:
        for name, parameter in source.parameter_names():
            names.setdefault(id(parameter), (path, name))
    return names


def flat_parameters(
    modules: list[tuple[Path, ModuleSource]], partitions: list[tuple[Path, FlatSource]]
) -> FlatParameters:
    """Parameters that hold ranges of several, and what these are called."""
    found: dict[int, tuple[Path, tuple[tuple[str, FlatSlice], ...]]] = {}
    for path, partition in partitions:
        slices = partition.partition.slices
        found[id(partition.partition.buffer)] = (path, tuple((one.name, one) for one in slices))
    for path, source in modules:
        for parameter, named in source.flat_parameters():
            found[id(parameter)] = (path, named)
    return found
