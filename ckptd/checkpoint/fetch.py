"""Carrying out a restore plan: verified bytes from shards into staging memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptd.checkpoint.concurrency import each, in_thread
from ckptd.checkpoint.plan import Read, ReadPlan, ShardPlan
from ckptd.checkpoint.regions import Slab
from ckptd.errors import UsageError

Scatter = Callable[[Sequence[Slab], memoryview, memoryview], None]
"""Copies slabs from the first memory into the second. Called in a thread."""


class ShardReader(Protocol):
    """Where a shard's bytes come from. :class:`ckptd.checkpoint.reader.CheckpointReader` is one."""

    async def read(self, rank: int, start: int, stop: int, out: memoryview) -> None:
        """The bytes ``[start, stop)`` of a rank's shard into ``out``, of exactly that size. Whole digest blocks are
        verified; what fails raises and names the object."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch did."""

    bytes_read: int
    requests: int
    seconds: float


async def fetch(reader: ShardReader, plan: ReadPlan, out: memoryview, *, scatter: Scatter, windows_max: int) -> Fetched:
    """Bring every want of the plan to its target in ``out``, which has at least ``plan.target_bytes``.

    At most ``windows_max`` reads at once. Those that go to their target as they are go straight into ``out``; each of
    the others has a window of memory meanwhile, at most ``WINDOW_BYTES``, and that is all it takes beyond ``out``.
    Raises what the reader raises; then ``out`` holds anything, and nothing writes to it any more.
    """
    if out.readonly or not out.c_contiguous or out.nbytes < plan.target_bytes:
        raise UsageError(f"the plan needs {plan.target_bytes} bytes of writable, contiguous memory, not {out.nbytes}")
    view = out.cast("B") if out.nbytes else out
    window_bytes = max((read.stop - read.start for _, read in plan.reads()), default=0)
    spare: list[memoryview] = []

    async def one(work: tuple[ShardPlan, Read]) -> None:
        shard, read = work
        size, parts = read.stop - read.start, shard.slabs(read)
        if len(parts) == 1 and parts[0].lengths == (size,):
            target = parts[0].target
            await reader.read(*read, view[target : target + size])
            return
        window = spare.pop() if spare else memoryview(bytearray(window_bytes))
        await reader.read(*read, window[:size])
        await in_thread(scatter, parts, window, view)
        spare.append(window)

    began = time.monotonic()
    await each(plan.reads(), windows_max, one)
    return Fetched(plan.bytes_read, plan.requests, time.monotonic() - began)


def scatter_bytes(parts: Sequence[Slab], source: memoryview, target: memoryview) -> None:
    """Row by row."""
    for part in parts:
        for at, to, length in part.copies():
            target[to : to + length] = source[at : at + length]
