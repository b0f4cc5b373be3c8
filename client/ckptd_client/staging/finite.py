"""Looking for values that are not finite, in the copy and not in the live state: training goes on meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckptd_client.capture import Leaf
from ckptd_client.capture.selection import Selection

CHUNK_ELEMENTS = 1 << 20
"""What is converted at once, where a dtype has to be."""

CheckFinite = Selection | bool
"""``True``: what an optimizer owns, or all where there is none. A selection: what it takes."""


def looked_at(leaves: Sequence[Leaf], check: CheckFinite) -> list[int]:
    """The numbers of the leaves that are to be finite. What is kept in memory only is looked at by its owner."""
    if check is False:
        return []
    numbers = [n for n, leaf in enumerate(leaves) if not leaf.resident and _may_be_not_finite(leaf.tensor.dtype)]
    if isinstance(check, Selection):
        return [n for n in numbers if check.takes(leaves[n].name)]
    return [n for n in numbers if leaves[n].fenced] or numbers


def not_finite(leaves: Sequence[Leaf], views: Sequence[torch.Tensor], numbers: Sequence[int]) -> tuple[str, ...]:
    """The names of those that hold a nan or an infinity."""
    found = [leaves[n].name for n in numbers if not _is_finite(views[n])]
    return tuple(dict.fromkeys(found))


def _may_be_not_finite(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point and "float4" not in str(dtype)) or dtype.is_complex


def _is_finite(view: torch.Tensor) -> bool:
    if view.numel() == 0:
        return True
    flat = (torch.view_as_real(view) if view.is_complex() else view).reshape(-1)
    if flat.dtype.itemsize > 1:
        # One pass without further memory. A sum hides no nan and no infinity; it may only overflow by itself.
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        if math.isfinite(flat.sum(dtype=dtype).item()):
            return True
    parts = (flat[start : start + CHUNK_ELEMENTS] for start in range(0, flat.numel(), CHUNK_ELEMENTS))
    return all(bool(torch.isfinite(_comparable(part)).all()) for part in parts)


def _comparable(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.float32) if part.dtype.itemsize == 1 else part
