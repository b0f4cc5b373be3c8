"""How large a state will grow once its optimizers have made their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_MOMENTS: dict[str, float] = {
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "SparseAdam": 2,
    "Adadelta": 2,
    "ASGD": 1,
    "Adagrad": 1,
    "Rprop": 2,
    "RMSprop": 1,
    "Muon": 1,
    "Adafactor": 1,
    "SGD": 0,
}
"""Tensors of the parameter's size that each optimizer of torch keeps, at the least."""
_MOMENTS_UNKNOWN = 2
_SMALL_STATE_BYTES = 512
"""Per parameter: step counters, and the entry in the header, the layout and the state tree."""


def expected_growth_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes that the optimizers will add at their first step; 0 for those that have made their state. A guess: an arena
    that turns out too small is replaced by a larger one."""
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            moments = _moments(type(optimizer).__name__, group)
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    total += int(local.nbytes * moments) + _SMALL_STATE_BYTES * (int(moments) + 1)
    return total


def _moments(name: str, group: dict[str, Any]) -> float:
    moments = _MOMENTS.get(name, _MOMENTS_UNKNOWN)
    moments += bool(group.get("amsgrad")) + bool(group.get("centered"))
    if name in ("SGD", "RMSprop"):
        moments += bool(group.get("momentum"))
    return moments
