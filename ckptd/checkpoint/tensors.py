"""Reading tensors, whole or in part, wherever their pieces lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.locating import touched
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import Copy, Region, copies, piece_region
from ckptd.checkpoint.shard_map import WINDOW_BYTES
from ckptd.errors import CoverageError, IntegrityError, UsageError
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.grid import cell_counts
from ckptd.format.records import IndexEntry, IndexPiece, TensorEntry

GROUPS_IN_FLIGHT_MAX = 4
"""Groups of copies, each with a window of memory, that are read at once."""


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
    the digest blocks that hold some of them. Raises as :class:`CheckpointReader` does."""
    item = ITEM_BYTES[tensor.dtype]
    if out.nbytes != wanted.element_count * item:
        raise UsageError(f"{tensor.name}: {wanted.element_count * item} bytes are wanted, not {out.nbytes}")
    pieces = await reader.locate(tensor.name, wanted) if tensor.own is None else _of_own(reader, tensor, wanted)
    view = out.cast("B") if out.nbytes else out

    async def one(work: tuple[IndexPiece, Sequence[Copy]]) -> None:
        await _read_group(reader, work[0], work[1], item, view)

    groups = (
        (piece, group)
        for piece in pieces
        for group in _groups(copies(piece_region(piece, tensor.shape), wanted), WINDOW_BYTES // item)
    )
    await each(groups, GROUPS_IN_FLIGHT_MAX, one)


def _of_own(reader: CheckpointReader, tensor: StoredTensor, wanted: Region) -> list[IndexPiece]:
    try:
        return touched(tensor.name, tensor.shape, tensor.own or (), wanted)
    except CoverageError as error:
        raise IntegrityError(f"{reader.manifest_place}: {error.message}") from None


def _groups(found: Sequence[Copy], elements_max: int) -> Iterator[Sequence[Copy]]:
    """Copies that are read together, as they lie within one window. One that is larger comes alone."""
    first = 0
    for i, copy in enumerate(found):
        if i > first and copy.source + copy.length - found[first].source > elements_max:
            yield found[first:i]
            first = i
    if first < len(found):
        yield found[first:]


async def _read_group(
    reader: CheckpointReader, piece: IndexPiece, group: Sequence[Copy], item: int, out: memoryview
) -> None:
    start, stop = group[0].source * item, (group[-1].source + group[-1].length) * item
    if len(group) == 1:
        target = group[0].target * item
        await reader.read(piece.rank, piece.at + start, piece.at + stop, out[target : target + stop - start])
        return
    window = memoryview(bytearray(stop - start))
    await reader.read(piece.rank, piece.at + start, piece.at + stop, window)
    for copy in group:
        source, target, size = copy.source * item - start, copy.target * item, copy.length * item
        out[target : target + size] = window[source : source + size]
