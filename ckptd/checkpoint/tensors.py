"""Reading tensors, whole or in part, wherever their pieces lie."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.checkpoint.fetch import fetch, scatter_bytes
from ckptd.checkpoint.plan import Want, make_plan
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import Region
from ckptd.errors import CoverageError, IntegrityError, UsageError
from ckptd.format.cover import check_cover
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.records import IndexEntry, IndexPiece, TensorEntry

REGION_WINDOWS_MAX = 4
"""Reads of one tensor at once, each with a window of memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: one value for the world, or one rank's own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[IndexPiece, ...]

    @property
    def size_bytes(self) -> int:
        return element_count(self.shape) * ITEM_BYTES[self.dtype]


def of_index(entry: IndexEntry) -> StoredTensor:
    """A tensor that is one value for the world."""
    return StoredTensor(entry.name, entry.dtype, entry.shape, entry.pieces)


def of_rank(entry: TensorEntry, rank: int) -> StoredTensor:
    """What one rank holds of a tensor, as a tensor of its own."""
    pieces = tuple(IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank, span=p.span) for p in entry.pieces)
    return StoredTensor(entry.name, entry.dtype, entry.shape, pieces)


async def find_tensor(reader: CheckpointReader, name: str, rank: int | None) -> StoredTensor | None:
    """The tensor of that name or alias, as ``rank`` sees it: its own value before the world's. Without a rank, only
    what is one value for the world."""
    layout = (await reader.receipt(rank or 0)).layout
    name = layout.aliases.get(name, name)
    if rank is not None:
        own = await reader.promised(rank, name)
        if own is not None and own.per_rank:
            return of_rank(own, rank)
    entry = await reader.find(name)
    return None if entry is None else of_index(entry)


async def read_region(reader: CheckpointReader, tensor: StoredTensor, wanted: Region, out: memoryview) -> None:
    """The elements of ``wanted``, as it lists them, into ``out``, which has exactly their size. Reads and verifies only
    the digest blocks that hold some of them, and what lies between those that are near. Raises as
    :class:`CheckpointReader` does."""
    want = Want(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, region=wanted, pieces=tensor.pieces)
    if out.nbytes != want.size_bytes:
        raise UsageError(f"{tensor.name}: {want.size_bytes} bytes are wanted, not {out.nbytes}")
    await _check_index(reader, tensor)
    blocks = {rank: await reader.block_bytes(rank) for rank in {piece.rank for piece in tensor.pieces}}
    await fetch(reader, make_plan([want], blocks), out, scatter=scatter_bytes, windows_max=REGION_WINDOWS_MAX)


async def _check_index(reader: CheckpointReader, tensor: StoredTensor) -> None:
    """Raise :class:`IntegrityError` unless the pieces are what their ranks' receipts say, and all of the tensor. The
    manifest has no digest of its own, so what it says is not believed without the receipts."""
    for piece in tensor.pieces:
        promised = await reader.promised(piece.rank, tensor.name)
        if promised is None or (promised.dtype, promised.shape) != (tensor.dtype, tensor.shape):
            raise IntegrityError(f"{reader.manifest_place}: {tensor.name!r} is not what rank {piece.rank} saved")
        if piece not in of_rank(promised, piece.rank).pieces:
            raise IntegrityError(f"{reader.manifest_place}: {tensor.name!r} has a piece that rank {piece.rank} has not")
    try:
        check_cover(tensor.name, tensor.shape, tensor.pieces)
    except CoverageError as error:
        raise IntegrityError(f"{reader.manifest_place}: {error.message}") from None
