"""Copying leaves into a slot: at once, or in a thread while the training goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch

from ckptd.limits import KIB, MIB

CHUNK_BYTES = 32 * MIB
"""After each chunk of an overlapped copy the daemon is told, so that parts leave while the slot fills."""
SMALL_BYTES = 256 * KIB
"""Below, tensors are copied many to a call; above, by memmove, which holds neither the GIL nor torch's thread pool."""

foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_  # pyright: ignore
"""1 µs a tensor and without the GIL, where a loop over ``copy_`` costs ten times that."""


def copy_now(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy in order with the computation: on return the sources may change. CPU sources only."""
    if targets:
        with torch.no_grad():
            foreach_copy(targets, sources)


def copy_aside(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    stops: Sequence[int],
) -> Iterator[int]:
    """Copy in the calling thread without holding the GIL; yields after each chunk the byte up to which the shard is
    copied. ``stops``: where each target ends in the shard, ascending."""
    small_targets: list[torch.Tensor] = []
    small_sources: list[torch.Tensor] = []
    pending_bytes = 0
    for target, source, stop in zip(targets, sources, stops, strict=True):
        size = target.nbytes
        if size >= SMALL_BYTES and source.is_contiguous():
            for start in range(0, size, CHUNK_BYTES):
                length = min(CHUNK_BYTES, size - start)
                ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, length)
                pending_bytes += length
                if pending_bytes >= CHUNK_BYTES and not small_targets:
                    pending_bytes = 0
                    yield stop - size + start + length
        else:
            small_targets.append(target)
            small_sources.append(source)
            pending_bytes += size
        if pending_bytes >= CHUNK_BYTES or len(small_targets) >= 1024:
            copy_now(small_targets, small_sources)
            small_targets, small_sources, pending_bytes = [], [], 0
            yield stop
    copy_now(small_targets, small_sources)
    if stops:
        yield stops[-1]
