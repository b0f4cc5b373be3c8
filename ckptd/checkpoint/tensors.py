"""Reading tensors, whole or in part, wherever their pieces lie."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.checkpoint.fetch import fetch, scatter_bytes
from ckptd.checkpoint.locating import touched
from ckptd.checkpoint.plan import Want, make_plan
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import Region
from ckptd.errors import CoverageError, IntegrityError, UsageError
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.grid import cell_counts
from ckptd.format.records import IndexEntry, IndexPiece, TensorEntry

REGION_WINDOWS_MAX = 4
"""Reads of one tensor at once, each with a window of memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: one value for the world, or one rank's own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    own: tuple[IndexPiece, ...] | None
    """The pieces of a rank's own value; those of the world's are located in the index when they are read."""
    cut: tuple[int, ...]
    """In how many pieces it lies: along each dimension where they are a grid, else one number."""

    @property
    def size_bytes(self) -> int:
        return element_count(self.shape) * ITEM_BYTES[self.dtype]


def of_index(entry: IndexEntry) -> StoredTensor:
    """A tensor that is one value for the world."""
    cut = (len(entry.pieces),) if entry.grid is None else cell_counts(entry.shape, entry.grid.chunks)
    return StoredTensor(entry.name, entry.dtype, entry.shape, None, cut)


def of_rank(entry: TensorEntry, rank: int) -> StoredTensor:
    """What one rank holds of a tensor, as a tensor of its own."""
    pieces = tuple(IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank, span=p.span) for p in entry.pieces)
    return StoredTensor(entry.name, entry.dtype, entry.shape, pieces, (len(pieces),))


async def find_tensor(reader: CheckpointReader, name: str, rank: int | None) -> StoredTensor | None:
    """The tensor of that name or alias, as ``rank`` sees it: its own value before the world's. Without a rank, only
    what is one value for the world."""
    aliases = await reader.aliases() if rank is None else (await reader.receipt(rank)).layout.aliases
    name = aliases.get(name, name)
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
    if out.nbytes != wanted.element_count * ITEM_BYTES[tensor.dtype]:
        raise UsageError(
            f"{tensor.name}: {wanted.element_count * ITEM_BYTES[tensor.dtype]} bytes are wanted, not {out.nbytes}"
        )
    pieces = await reader.locate(tensor.name, wanted) if tensor.own is None else _of_own(reader, tensor, wanted)
    want = Want(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, region=wanted, pieces=tuple(pieces))
    blocks = {rank: await reader.block_bytes(rank) for rank in {piece.rank for piece in pieces}}
    await fetch(reader, make_plan([want], blocks), out, scatter=scatter_bytes, windows_max=REGION_WINDOWS_MAX)


def _of_own(reader: CheckpointReader, tensor: StoredTensor, wanted: Region) -> list[IndexPiece]:
    try:
        return touched(tensor.name, tensor.shape, tensor.own or (), wanted)
    except CoverageError as error:
        raise IntegrityError(f"{reader.manifest_place}: {error.message}") from None
