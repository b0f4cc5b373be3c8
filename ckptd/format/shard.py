"""A shard: one rank's object, a valid safetensors file whose data starts on a page boundary and has no holes.

Pieces lie in order of falling item size, so that each is aligned to its item, in the slot as in the file. The header
is padded with spaces (which safetensors allows) so that the data starts at a multiple of 4096 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ckptd.errors import FormatError, StateError
from ckptd.format.digests import digest_blocks
from ckptd.format.dtypes import ITEM_BYTES, STORED_BYTES, element_count, stored_as
from ckptd.format.duplicates import refuse_duplicates
from ckptd.format.records import Shape, Size
from ckptd.limits import BLOCK_BYTES_MAX, HEADER_BYTES_MAX, NAME_BYTES_MAX, PAGE_BYTES


class StoredPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece as it is to lie in a shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return element_count(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where everything lies in a shard."""

    header: bytes
    """All bytes before the data, padded: its length is where the data starts, a multiple of 4096."""
    offsets: tuple[int, ...]
    """Byte offset of each piece from the start of the file, in the order in which the pieces were given."""
    size_bytes: int
    """Of the whole file."""


def file_order(pieces: Sequence[StoredPiece]) -> list[int]:
    """Indices of the pieces in the order in which they lie in the file: large items first, else as given."""
    return sorted(range(len(pieces)), key=lambda i: -ITEM_BYTES[pieces[i].dtype])


def lay_out(pieces: Sequence[StoredPiece]) -> ShardLayout:
    """Lay pieces out as a shard. Raises :class:`StateError` where a name is taken or too long, or the header grows too
    long."""
    order = file_order(pieces)
    laid = lay_in_order([pieces[i] for i in order])
    offsets = [0] * len(pieces)
    for i, offset in zip(order, laid.offsets, strict=True):
        offsets[i] = offset
    return ShardLayout(laid.header, tuple(offsets), laid.size_bytes)


def lay_in_order(pieces: Sequence[StoredPiece]) -> ShardLayout:
    """As :func:`lay_out`, in the order in which they are given."""
    offsets: list[int] = []
    position = 0
    entries: dict[str, object] = {"__metadata__": {"ckptd": "1"}}
    for piece in pieces:
        if piece.name in entries:
            raise StateError(f"{piece.name[:200]}: two pieces of the state have this name")
        if len(piece.name.encode()) > NAME_BYTES_MAX:
            raise StateError(f"{piece.name[:200]}…: a name of more than {NAME_BYTES_MAX} bytes")
        dtype, shape = stored_as(piece.dtype, piece.shape)
        stop = position + piece.size_bytes
        entries[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, stop)}
        offsets.append(position)
        position = stop
    text = msgspec.json.encode(entries)
    data_start = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    if data_start - 8 > HEADER_BYTES_MAX:
        raise StateError(f"{len(pieces)} pieces make a header of {len(text)} bytes, over {HEADER_BYTES_MAX}")
    header = struct.pack("<Q", data_start - 8) + text.ljust(data_start - 8, b" ")
    return ShardLayout(header, tuple(data_start + offset for offset in offsets), data_start + position)


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Size, Size]


def read_header(data: bytes | memoryview) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Name → (safetensors dtype, shape, start, stop), byte offsets from the start of the file.

    ``data`` is the file's head, at least its whole header. Raises :class:`FormatError` unless the header is such as
    safetensors allows: the pieces lie one behind the other without hole or overlap, each as long as its dtype and shape
    make it (types that no shard of ours holds are not measured).
    """
    if len(data) < 8:
        raise FormatError(f"a shard of {len(data)} bytes has no header")
    (length,) = struct.unpack("<Q", data[:8])
    if length > HEADER_BYTES_MAX or 8 + length > len(data):
        raise FormatError(f"shard header of {length} bytes in {len(data)} bytes read")
    text = bytes(data[8 : 8 + length]).rstrip(b" ")
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        foreword = {name: msgspec.json.decode(raw.pop(name)) for name in ("__metadata__",) if name in raw}
        entries = {name: msgspec.json.decode(entry, type=_HeaderEntry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FormatError(f"shard header is not safetensors JSON: {error}") from None
    refuse_duplicates(text, msgspec.json.encode(foreword | entries))
    _check_dense(entries)
    start = 8 + length
    return {n: (e.dtype, e.shape, start + e.data_offsets[0], start + e.data_offsets[1]) for n, e in entries.items()}


def _check_dense(entries: Mapping[str, _HeaderEntry]) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        wanted = element_count(entry.shape) * STORED_BYTES[entry.dtype] if entry.dtype in STORED_BYTES else stop - start
        if start != position or stop - start != wanted:
            raise FormatError(
                f"{name[:200]}: lies at {start}:{stop} of the data, expected {position}:{position + wanted}"
            )
        position = stop


def block_bounds(
    header_bytes: int, piece_bytes: Sequence[int], block_bytes: int = BLOCK_BYTES_MAX
) -> Iterator[tuple[int, int]]:
    """Half-open byte ranges of the digest blocks of a shard, in order: the header, then each piece in file order,
    each cut every ``block_bytes``. An empty piece has no block."""
    return cut_in_blocks(0, (header_bytes, *piece_bytes), block_bytes)


def cut_in_blocks(start: int, sizes: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int]]:
    """The same for anything that lies dense from byte ``start`` on, such as resident pieces in a slot."""
    position = start
    for size in sizes:
        stop = position + size
        while position < stop:
            end = min(position + block_bytes, stop)
            yield position, end
            position = end


def block_count(size_bytes: int, block_bytes: int = BLOCK_BYTES_MAX) -> int:
    """How many digest blocks a header or piece of this size has."""
    return -(-size_bytes // block_bytes)


def header_digests(header: bytes, block_bytes: int) -> bytes:
    """The packed digests of a header's blocks."""
    return digest_blocks(memoryview(header), cut_in_blocks(0, (len(header),), block_bytes))
