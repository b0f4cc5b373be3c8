"""Bringing parts of stored tensors together: what is in this node's memory is used where it lies, the rest is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ckptd.checkpoint.fetch import ShardReader
from ckptd.checkpoint.plan import Want, make_plan, stage
from ckptd.checkpoint.regions import holds_exactly, piece_region, slabs
from ckptd.format.dtypes import ITEM_BYTES
from ckptd_client.capture.stored import Amount
from ckptd_client.dtypes import torch_dtype
from ckptd_client.fetch import fetch
from ckptd_client.fresh import fresh_memory

Scratch = Callable[[int], memoryview | None]
"""Memory of so many bytes that is there already, where there is enough."""


class FromMemory:
    """A reader of shards that takes those of some ranks from memory."""

    def __init__(self, memory: Mapping[int, memoryview], others: ShardReader | None = None) -> None:
        self._memory = memory
        self._others = others

    async def read(self, rank: int, start: int, stop: int, out: memoryview) -> None:
        """See :class:`ShardReader`."""
        found = self._memory.get(rank)
        if found is not None:
            out[:] = found[start:stop]
        elif self._others is not None:
            await self._others.read(rank, start, stop, out)
        else:
            raise KeyError(rank)


async def gather(
    wants: Sequence[Want],
    memory: Mapping[int, memoryview],
    reader: ShardReader,
    block_bytes: Mapping[int, int],
    scratch: Scratch,
) -> tuple[list[torch.Tensor], Amount]:
    """The elements of each want, flat, and what was read for them: a view of ``memory`` (rank → its shard, verified)
    where they lie there together, else of new memory or of ``scratch``, read through ``reader``. Raises what planning
    and reading raise."""
    found = [_in_place(want, memory) for want in wants]
    amount = Amount()
    absent = [i for i, view in enumerate(found) if view is None]
    if absent:
        placed, size = stage([wants[i] for i in absent])
        out = scratch(size) or fresh_memory(size)
        plan = make_plan(placed, block_bytes)
        await fetch(FromMemory(memory, reader), plan, out)
        amount = Amount(plan.bytes_wanted, plan.bytes_read, plan.requests)
        for i, want in zip(absent, placed, strict=True):
            found[i] = _view(out, want.target, want)
    return [view for view in found if view is not None], amount


def _in_place(want: Want, memory: Mapping[int, memoryview]) -> torch.Tensor | None:
    if not want.size_bytes:
        return torch.empty(0, dtype=torch_dtype(want.dtype))
    if len(want.pieces) != 1 or want.pieces[0].rank not in memory:
        return None
    (piece,) = want.pieces
    if holds_exactly(piece, want.region, want.shape):
        return _view(memory[piece.rank], piece.at, want)
    parts = slabs(piece_region(piece, want.shape), want.region, ITEM_BYTES[want.dtype], piece.at)
    if len(parts) != 1 or parts[0].lengths != (want.size_bytes,) or parts[0].source % ITEM_BYTES[want.dtype]:
        return None
    return _view(memory[piece.rank], parts[0].source, want)


def _view(memory: memoryview, at: int, want: Want) -> torch.Tensor:
    dtype = torch_dtype(want.dtype)
    if not want.size_bytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=want.region.element_count, offset=at)
