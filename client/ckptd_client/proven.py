"""A checkpoint's bytes for one rank, verified, before anything touches the live state."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from ckptd.arena import Arena
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import check_proof
from ckptd.errors import CkptdError, IntegrityError, MismatchError, first_line
from ckptd.format.cover import check_layout
from ckptd.format.digests import DIGEST_BYTES, digest_blocks
from ckptd.format.keys import Version, receipt_key
from ckptd.format.records import Layout, Receipt, Snapshot, TensorEntry, decode, decode_layout
from ckptd.format.shard import block_bounds
from ckptd.limits import RECEIPT_BYTES_MAX
from ckptd_client.blocking import run_blocking
from ckptd_client.dtypes import torch_dtype
from ckptd_client.roots import Root

Source = Literal["memory", "storage", "none"]

_log = logging.getLogger(__name__)


class MemoryOffers(Protocol):
    """Snapshots of this rank that the daemon holds."""

    def held(self) -> Mapping[Version, str]:
        """Those that are sealed or durable → the id of their run."""
        ...

    def locate(self, version: Version) -> tuple[Arena, int]:
        """The arena, mapped, and the slot. Raises :class:`ckptd.errors.DaemonError` where it is gone."""
        ...

    def await_idle(self) -> None:
        """Wait, bounded, until no save of this rank is in flight any more."""
        ...


@dataclass(slots=True)
class Proven:
    """What one rank saved, verified, in memory."""

    snapshot: Snapshot
    layout: Layout
    shard: memoryview
    source: Source
    _entries: dict[str, TensorEntry] = field(init=False)

    def __post_init__(self) -> None:
        self._entries = {entry.name: entry for entry in self.layout.tensors}

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the verified bytes: this rank's piece of a tensor, in its saved dtype."""
        entry = self._entries[name]
        dtype = torch_dtype(entry.dtype)
        piece = entry.pieces[0] if entry.pieces else None
        shape = entry.shape if piece is None or piece.box is None else piece.box.lengths
        if piece is None or piece.bytes == 0:
            return torch.empty(shape if piece is not None else (0,), dtype=dtype)
        return (
            torch.frombuffer(self.shard, dtype=torch.uint8)[piece.at : piece.at + piece.bytes].view(dtype).view(shape)
        )


def from_memory(offers: MemoryOffers, root: Root, version: Version) -> Proven | None:
    """The snapshot in the daemon's memory, or ``None`` where it is damaged or gone."""
    try:
        arena, number = offers.locate(version)
        record = arena.record(number)
        snapshot = decode(arena.doc(number, record), Snapshot)
        found = Proven(snapshot, decode_layout(snapshot.layout), arena.slot(number)[: record.shard_bytes], "memory")
        _check_memory(root, found)
    except CkptdError as error:
        _log.warning("the snapshot of step %s in memory is not used: %s", version.step, first_line(error))
        return None
    return found


def _check_memory(root: Root, found: Proven) -> None:
    """Hold a snapshot in memory against its receipt, where there is one already.

    A sealed snapshot whose receipt is not written yet has nothing to be held against but its seal.
    """
    snapshot, layout = found.snapshot, found.layout
    key = receipt_key(snapshot.version, snapshot.rank, snapshot.world)

    async def read() -> bytes:
        async with root.visit() as backend:
            return await backend.get(key, limit_bytes=RECEIPT_BYTES_MAX)

    try:
        promised = decode(run_blocking(read()), Receipt).shard.blocks
    except CkptdError:
        return
    pieces = check_layout(layout)
    blocks = digest_blocks(found.shard, block_bounds(layout.header_bytes, [piece.bytes for piece in pieces]))
    for start in range(0, len(blocks), DIGEST_BYTES):
        if blocks[start : start + DIGEST_BYTES] != promised[start : start + DIGEST_BYTES]:
            raise IntegrityError(f"block {start // DIGEST_BYTES} of the snapshot in memory has changed")


async def from_storage(
    root: Root, version: Version, rank: int, world: int, scratch: Callable[[int], memoryview | None]
) -> Proven:
    """A committed checkpoint's shard, read into ``scratch`` memory where there is enough, every block verified.

    Rank 0 proves the manifest as well. Raises :class:`MismatchError` for a checkpoint of another number of ranks, and
    what :class:`CheckpointReader` raises.
    """
    async with (
        root.visit() as backend,
        await CheckpointReader.open(await Run.open(backend), version, holder=root.holder) as reader,
    ):
        if reader.manifest.world != world:
            raise MismatchError(
                f"step {version.step} was saved by {reader.manifest.world} ranks, and there are {world}",
                hint="restore on the same number of ranks",
            )
        if rank == 0:
            await check_proof(reader)
        found = await reader.receipt(rank)
        out = scratch(found.layout.shard_bytes) or _anonymous(found.layout.shard_bytes)
        await reader.read_shard(rank, out)
    return Proven(found.snapshot, found.layout, out, "storage")


def _anonymous(size_bytes: int) -> memoryview:
    # Private, as first touches of shared memory cost half as much again.
    return memoryview(mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size_bytes]
