"""Distributed tensors: which part of the global tensor this rank holds."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

from ckptd.errors import StateError
from ckptd.format.records import Box, Span


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor. Imports nothing: without the module there can be no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of the tensor: the tensor itself unless it is a DTensor."""
    if not is_distributed(tensor):
        return tensor
    local = cast(Any, tensor)._local_tensor  # to_local() would enter the autograd graph
    return cast(torch.Tensor, local.wait() if hasattr(local, "wait") else local)  # wait: a collective in flight


def part_of(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box | None, Span | None]:
    """The local tensor that this rank is to save and where it lies in the global one; neither box nor span: all of it.

    Of replicas the one at coordinate 0 of each replicated mesh dimension is saved; the others, and a rank outside the
    mesh, own an empty part. Raises :class:`StateError` for sums that are not yet reduced.
    """
    if not is_distributed(tensor):
        return tensor, None, None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    distributed: Any = tensor
    mesh, placements = distributed.device_mesh, distributed.placements
    if any(placement.is_partial() for placement in placements):
        raise StateError(f"{name}: a DTensor with a partial placement is not a value yet", hint="redistribute it first")
    shape = tuple(tensor.shape)
    local = local_of(tensor)
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    owner = coordinate is not None and all(
        place == 0 for place, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    if owner:
        # An empty part may be given any offset; where it starts must still lie inside the tensor.
        start = tuple(min(offset, size) for offset, size in zip(offsets, shape, strict=True))
        return local, Box(start, tuple(lengths)), None
    nothing = local.new_empty((0,))
    return (nothing, Box((0,) * len(shape), (0,) * len(shape)), None) if shape else (nothing, None, Span(0, 0))
