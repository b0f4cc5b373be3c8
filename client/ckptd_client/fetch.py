"""Fetching what a restore plan reads, with torch to copy many short rows at memory speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckptd.checkpoint import fetch as core
from ckptd.checkpoint.fetch import Fetched, ShardReader
from ckptd.checkpoint.plan import ReadPlan
from ckptd.checkpoint.reader import WINDOWS_IN_FLIGHT_MAX
from ckptd.checkpoint.regions import Slab
from ckptd.checkpoint.shard_map import WINDOW_BYTES
from ckptd.limits import KIB

FETCH_MEMORY_BYTES_MAX = WINDOWS_IN_FLIGHT_MAX * WINDOW_BYTES
"""What a fetch takes beyond the memory that it fills: a window for each read in flight."""
PLAIN_COPY_BYTES_MAX = 256 * KIB
"""Up to here bytes that lie together are copied by Python, which costs less than a call of torch; beyond, it would hold
the interpreter for too long."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types whose copy is a copy of bytes, whatever they mean."""


async def fetch(
    reader: ShardReader, plan: ReadPlan, out: memoryview, *, windows_max: int = WINDOWS_IN_FLIGHT_MAX
) -> Fetched:
    """Bring every want of the plan to its target in ``out``, verified; see :func:`ckptd.checkpoint.fetch.fetch`.

    The reader and its backend may let fewer than ``windows_max`` reads go on at once. Takes at most
    ``FETCH_MEMORY_BYTES_MAX`` more, or less with fewer windows.
    """
    return await core.fetch(reader, plan, out, scatter=scatter, windows_max=windows_max)


def scatter(parts: Sequence[Slab], source: memoryview, target: memoryview) -> None:
    """Copy slabs from one memory to another, each in one operation."""
    as_source, as_target = _Words(source), _Words(target)
    for part in parts:
        size = part.lengths[-1]
        if len(part.lengths) == 1 and size <= PLAIN_COPY_BYTES_MAX:
            target[part.target : part.target + size] = source[part.source : part.source + size]
            continue
        # Words as wide as everything is a multiple of: a lattice of single bytes would be slow.
        starts = as_source.address, part.source, as_target.address, part.target
        width = math.gcd(*starts, size, *part.source_steps[:-1], *part.target_steps[:-1], max(_WORDS))
        lengths = (*part.lengths[:-1], size // width)
        as_target.lattice(width, part.target, lengths, part.target_steps).copy_(
            as_source.lattice(width, part.source, lengths, part.source_steps)
        )


class _Words:
    """Memory as tensors of words of any width."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._views = {1: torch.frombuffer(memory, dtype=torch.uint8)}
        self.address = self._views[1].data_ptr()

    def lattice(self, width: int, start: int, lengths: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
        """The words at regular distances from byte ``start`` on; steps in bytes, the last of one word."""
        view = self._views.get(width)
        if view is None:
            count = len(self._memory) // width
            view = self._views[width] = torch.frombuffer(self._memory, dtype=_WORDS[width], count=count)
        return view.as_strided(lengths, [*(step // width for step in steps[:-1]), 1], start // width)
