"""A receipt as a map of its shard: where the digest blocks lie, and what they must be. Pure.

Places are those of the slot, whether bytes lie in the rank's own shard or in one that it refers to; see
:mod:`ckptd.format.references`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ckptd.checkpoint.objects import DAMAGED, damaged, decode_at
from ckptd.errors import CoverageError, FormatError
from ckptd.format.cover import check_layout
from ckptd.format.digests import DIGEST_BYTES, digest_blocks, first_difference, hex_digest
from ckptd.format.keys import receipt_key, shard_key
from ckptd.format.records import Layout, Manifest, Receipt, Snapshot, TensorEntry, decode_layout
from ckptd.format.references import Stretch, header_bytes, stretches
from ckptd.format.shard import cut_in_blocks
from ckptd.limits import MIB

WINDOW_BYTES = 8 * MIB
"""Read and verified at once."""


class RankRecords(NamedTuple):
    """What a checkpoint says of one rank, verified against the manifest."""

    receipt: Receipt
    snapshot: Snapshot
    layout: Layout


@dataclass(frozen=True, slots=True)
class ShardMap:
    """One rank's shard, and where its digest blocks start; the last number is where it ends."""

    records: RankRecords
    starts: array[int]
    stretches: Sequence[Stretch]
    """Where everything is stored."""
    by_name: dict[str, TensorEntry]

    @property
    def start(self) -> int:
        """Where its header starts; 0 where it holds all of its pieces itself."""
        return self.starts[0]

    @property
    def stop(self) -> int:
        return self.starts[-1]

    def object_bytes(self, key: str) -> int:
        """How long a shard must be of which this one has bytes: its own, or one that it refers to."""
        shard = self.records.receipt.shard
        return next((reference.bytes for reference in shard.references if reference.key == key), shard.bytes)

    def entry(self, name: str) -> TensorEntry | None:
        """What the layout says of a tensor."""
        return self.by_name.get(name)

    def windows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The blocks that ``[start, stop)`` touches, as half-open ranges of block numbers, each in one object. Those
        that reach beyond it come alone, so that only they need memory of their own."""
        first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)
        while first < last:
            end = first + 1
            if self.starts[first] >= start:
                within = min(stop, self.starts[first] + WINDOW_BYTES, self.stretch(self.starts[first]).stop)
                while end < last and self.starts[end + 1] <= within:
                    end += 1
            yield first, end
            first = end

    def stretch(self, start: int) -> Stretch:
        """Where the byte at ``start`` is stored, with what follows it there."""
        return self.stretches[bisect_right(self.stretches, start, key=lambda stretch: stretch.start) - 1]

    def first_bad_block(self, window: tuple[int, int], data: memoryview) -> int | None:
        """The first block of the window that differs from its digest. ``data``: the window's bytes."""
        first, last = window
        begin = self.starts[first]
        places = [start - begin for start in self.starts[first : last + 1]]
        found = digest_blocks(data, pairwise(places))
        bad = first_difference(found, self.records.receipt.shard.blocks[first * DIGEST_BYTES : last * DIGEST_BYTES])
        return None if bad is None else first + bad

    def what_lies_at(self, start: int, stop: int) -> str:
        """A block in words. A block lies in the header or in one piece."""
        for entry in self.records.layout.tensors:
            if any(piece.bytes and piece.at < stop and start < piece.at + piece.bytes for piece in entry.pieces):
                return f"of tensor {entry.name!r}"
        return "the shard's header"


def map_shard(url: str, manifest: Manifest, rank: int, data: bytes) -> ShardMap:
    """The map that a rank's receipt makes. Raises :class:`IntegrityError` where it is not what the manifest's
    checkpoint must have there, :class:`FormatError` where it is no receipt."""
    where = f"{url}/{receipt_key(manifest.version, rank, manifest.world)}"
    receipt = decode_at(where, data, Receipt)
    snapshot = decode_at(where, receipt.snapshot, Snapshot)
    try:
        layout = decode_layout(snapshot.layout)
        pieces = check_layout(layout)
    except FormatError as error:
        raise FormatError(f"{where}: {error.message}", hint=DAMAGED) from None
    except CoverageError as error:
        raise damaged(where, f"has a layout that does not hold: {error.message}") from None
    found = snapshot.run, snapshot.version, snapshot.world, snapshot.rank, snapshot.launch, snapshot.parent
    if found != (manifest.run, manifest.version, manifest.world, rank, manifest.launch, manifest.parent):
        raise damaged(where, "is the receipt of another rank, checkpoint, launch or run")
    shard = receipt.shard
    try:
        found_at = stretches(layout, pieces, shard)
    except CoverageError as error:
        raise damaged(where, f"does not fit its own layout: {error.message}") from None
    header = header_bytes(layout, shard)
    sizes = (header, *(piece.bytes for piece in pieces))
    starts = array("Q", [begin for begin, _ in cut_in_blocks(layout.header_bytes - header, sizes, shard.block_bytes)])
    if len(shard.blocks) != DIGEST_BYTES * len(starts):
        raise damaged(where, "does not fit its own layout")
    if hex_digest(shard.blocks) != shard.digest:
        raise damaged(where, "has block digests that do not add up")
    if shard.key != shard_key(manifest.version, rank, manifest.world, shard.attempt):
        raise damaged(where, f"names a foreign shard, {shard.key[:200]}")
    starts.append(layout.shard_bytes)
    return ShardMap(
        RankRecords(receipt, snapshot, layout), starts, found_at, {entry.name: entry for entry in layout.tensors}
    )
