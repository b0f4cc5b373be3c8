"""Copying what was read into the live tensors, at the speed of memory."""

# torch keeps its operations on many tensors to itself
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ckptd.limits import MIB
from ckptd_client.threads import shared_out

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source, of one shape."""

BATCH_BYTES = 8 * MIB
"""Copied by one thread at a time."""
BATCH_TENSORS = 4096


def shaped_as(target: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor, flat, in the shape of the target."""
    return flat if target.dim() == 1 else flat.view(target.shape)


def copy_all(copies: Sequence[Copy]) -> None:
    """Copy each source into its target, cast where they differ in dtype. No two targets share memory."""
    shared_out(_copy, list(_batches(copies)))


def _copy(batch: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    with torch.no_grad():  # of each thread
        torch._foreach_copy_(*batch)


def _batches(copies: Sequence[Copy]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    size = 0
    for target, source in copies:
        pieces = _pieces(target, source) if target.nbytes > BATCH_BYTES else ((target, source),)
        for one, other in pieces:
            targets.append(one)
            sources.append(other)
            size += one.nbytes
            if size >= BATCH_BYTES or len(targets) >= BATCH_TENSORS:
                yield targets, sources
                targets, sources, size = [], [], 0
    if targets:
        yield targets, sources


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[Copy]:
    """Of a large tensor that lies together in both memories, parts of the size of a batch."""
    if not (target.is_contiguous() and source.is_contiguous()):
        yield target, source
        return
    length = BATCH_BYTES // target.element_size()
    yield from zip(torch.split(target.view(-1), length), torch.split(source.view(-1), length), strict=True)
