"""A checkpoint in the memory of this node: the snapshots that its ranks left with the daemon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckptd.arena import Arena
from ckptd.checkpoint.plan import Want
from ckptd.checkpoint.regions import Region, holds_exactly, piece_of_rank, piece_region, slabs
from ckptd.errors import CkptdError, CoverageError, IntegrityError
from ckptd.format.common_tree import Merge
from ckptd.format.cover import check_layout
from ckptd.format.digests import DIGEST_BYTES, digest_blocks, first_difference
from ckptd.format.keys import receipt_key
from ckptd.format.records import IndexPiece, Layout, Receipt, Snapshot, TensorEntry, decode, decode_layout
from ckptd.format.references import header_bytes
from ckptd.format.shard import block_count, cut_in_blocks
from ckptd.format.tree import decode_json
from ckptd.limits import BLOCK_BYTES_MAX, RECEIPT_BYTES_MAX
from ckptd.wire.messages import SnapshotOffer
from ckptd_client.blocking import run_blocking
from ckptd_client.capture.nodes import node_at
from ckptd_client.capture.stored import Amount, Described, InCommon, Ranks, Wanted
from ckptd_client.gather import FromMemory, Scratch, gather
from ckptd_client.roots import Root
from ckptd_client.threads import shared_out

BLOCKS_AT_ONCE = 256
"""Digested by one thread at a time."""


class MemoryOffers(Protocol):
    """Snapshots that the daemon of this node holds."""

    def held(self) -> Sequence[SnapshotOffer]:
        """Those of this run that are sealed or durable, of whichever rank."""
        ...

    def locate(self, offer: SnapshotOffer) -> tuple[Arena, int]:
        """The arena, mapped, and the slot. Raises :class:`ckptd.errors.DaemonError` where it is gone."""
        ...

    def await_idle(self) -> None:
        """Wait, bounded, until no save of this run is in flight any more on this node."""
        ...

    def scratch(self, size_bytes: int) -> memoryview | None:
        """Memory of so many bytes that is there already, where there is enough."""
        ...


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """One rank's snapshot."""

    snapshot: Snapshot
    layout: Layout
    memory: memoryview
    """Of its slot: the shard, and behind it what is resident."""
    arena: Arena
    slot: int
    ticket: int

    @classmethod
    def at(cls, offers: MemoryOffers, offer: SnapshotOffer) -> HeldSnapshot:
        """Raises :class:`ckptd.errors.DaemonError` where it is gone, :class:`IntegrityError` and
        :class:`ckptd.errors.FormatError` where it is damaged."""
        arena, slot = offers.locate(offer)
        record = arena.record(slot)
        snapshot = decode(arena.doc(slot, record), Snapshot)
        layout = decode_layout(snapshot.layout)
        size = max(record.shard_bytes, layout.resident_bytes)
        return cls(snapshot, layout, arena.slot(slot)[:size], arena, slot, offer.ticket)

    def check(self, promised: Receipt | None) -> None:
        """Hold it against its receipt. Before that is written, there is nothing to hold it against but its seal. Raises
        :class:`IntegrityError` where it has changed."""
        if promised is None:
            return
        pieces, proof = check_layout(self.layout), promised.shard
        # Not the header: that of the stored shard is another one where its receipt refers to others.
        sizes = [piece.bytes for piece in pieces]
        bounds = list(cut_in_blocks(self.layout.header_bytes, sizes, proof.block_bytes))
        batches = [bounds[start : start + BLOCKS_AT_ONCE] for start in range(0, len(bounds), BLOCKS_AT_ONCE)]
        blocks = b"".join(shared_out(self._digest, batches))
        header_blocks = block_count(header_bytes(self.layout, proof), proof.block_bytes)
        bad = first_difference(blocks, proof.blocks[header_blocks * DIGEST_BYTES :])
        if bad is not None:
            raise IntegrityError(f"block {bad} of rank {self.snapshot.rank}'s snapshot in memory has changed")

    def _digest(self, bounds: Sequence[tuple[int, int]]) -> bytes:
        self.arena.populate_slot(self.slot, bounds[0][0], bounds[-1][1])
        return digest_blocks(self.memory, bounds)

    def check_still_there(self) -> None:
        """Raise :class:`IntegrityError` where another snapshot has come into the slot."""
        if self.arena.closed or self.arena.record(self.slot).ticket != self.ticket:
            raise IntegrityError(f"rank {self.snapshot.rank}'s snapshot in memory was overwritten while it was read")


class HeldCheckpoint:
    """A :class:`ckptd_client.capture.stored.Stored` in memory: the snapshots of those ranks that ran on this node."""

    def __init__(
        self,
        held: Mapping[int, HeldSnapshot],
        root: Root,
        *,
        rank: int,
        world: int,
        scratch: Scratch,
    ) -> None:
        """Raises :class:`IntegrityError` where what is here is not enough for this rank."""
        first = next(iter(held.values())).snapshot
        self.ranks = Ranks(rank, world, first.world, f"{first.run}/{first.version}")
        self._held = held
        self._root = root
        self._scratch = scratch
        self.amount = Amount()
        self.aliases: Mapping[str, str]
        if self.ranks.same:
            own = self._of([rank])[0]
            self.tree, self.aliases = bytes(own.snapshot.tree), own.layout.aliases
        else:
            self.tree, self.aliases = self.in_common()
        self._entries: dict[str, dict[int, TensorEntry]] = defaultdict(dict)
        for one, snapshot in held.items():
            for entry in snapshot.layout.tensors:
                self._entries[entry.name][one] = entry

    def _of(self, ranks: Sequence[int]) -> list[HeldSnapshot]:
        if lacking := [one for one in ranks if one not in self._held]:
            raise IntegrityError(f"the snapshot of rank {lacking[0]} is not in this node's memory")
        return [self._held[one] for one in ranks]

    def in_common(self) -> InCommon:
        """See :class:`Stored`. Raises :class:`IntegrityError` where not all ranks' snapshots are here."""
        merge, names = Merge(), dict[str, None]()
        for one in self._of(range(self.ranks.saved_world)):
            merge.add(one.snapshot.tree, one.layout.aliases)
            names |= dict.fromkeys(entry.name for entry in one.layout.tensors)
        return InCommon(bytes(merge.tree), merge.aliases(names))

    def describe(self, name: str) -> Described | None:
        """See :class:`Stored`."""
        entries = self._entries.get(name)
        if not entries:
            return None
        own = entries.get(self.ranks.rank) if self.ranks.same else None
        if own is None and any(entry.per_rank for entry in entries.values()) and not self._equal(entries):
            return None
        entry = own or next(iter(entries.values()))
        return Described(name, entry.dtype, entry.shape)

    def _equal(self, entries: Mapping[int, TensorEntry]) -> bool:
        """Whether what each rank calls its own is one value, as a commit would find."""
        found = [self._bytes_of(rank, entry) for rank, entry in entries.items()]
        kinds = {(entry.dtype, entry.shape) for entry in entries.values()}
        return len(kinds) == 1 and all(torch.equal(found[0], other) for other in found[1:])

    def _bytes_of(self, rank: int, entry: TensorEntry) -> torch.Tensor:
        parts = [self._held[rank].memory[piece.at : piece.at + piece.bytes] for piece in entry.pieces if piece.bytes]
        return torch.cat([torch.frombuffer(part, dtype=torch.uint8) for part in parts]) if parts else torch.empty(0)

    def fetch(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """See :class:`Stored`. Raises :class:`IntegrityError` where not all of it is here, or some has changed."""
        wants = [self._want(each) for each in wanted]
        used = {piece.rank for want in wants for piece in want.pieces}
        memory = {rank: self._held[rank].memory for rank in used}
        try:
            run_blocking(self._check(sorted(used)))
            found, self.amount = run_blocking(
                gather(wants, memory, FromMemory(memory), dict.fromkeys(used, BLOCK_BYTES_MAX), self._scratch)
            )
        except CoverageError as error:
            raise IntegrityError(f"this node's memory has not all of it: {error.message}") from None
        for rank in used:
            self._held[rank].check_still_there()
        return found

    def _want(self, wanted: Wanted) -> Want:
        tensor, entries = wanted.tensor, self._entries[wanted.tensor.name]
        own = entries.get(self.ranks.rank)
        if self.ranks.same and own is not None and own.per_rank:
            entries = {self.ranks.rank: own}
        elif any(entry.per_rank for entry in entries.values()):
            entries = dict([next(iter(entries.items()))])
        pieces = _covering(entries, wanted.region, tensor.shape)
        return Want(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, region=wanted.region, pieces=tuple(pieces)
        )

    async def _check(self, ranks: Sequence[int]) -> None:
        async with self._root.visit() as backend:
            for rank in ranks:
                held = self._held[rank]
                key = receipt_key(held.snapshot.version, rank, held.snapshot.world)
                try:
                    promised = decode(await backend.get(key, limit_bytes=RECEIPT_BYTES_MAX), Receipt)
                except CkptdError:
                    promised = None
                held.check(promised)

    def of_each_rank(self, part: str) -> Sequence[Any] | None:
        """See :class:`Stored`."""
        if self.ranks.same:
            return None
        trees = [decode_json(bytes(self._held[rank].snapshot.tree)) for rank in range(self.ranks.saved_world)]
        nodes = [node_at(tree, part) for tree in trees]
        return None if any(node is None for node in nodes) else nodes


def _covering(entries: Mapping[int, TensorEntry], wanted: Region, shape: tuple[int, ...]) -> list[IndexPiece]:
    """Pieces that hold some of ``wanted``, none of it twice: those of shards first, then resident ones."""
    for rank, entry in entries.items():
        for piece in entry.pieces:
            if holds_exactly(piece, wanted, shape):
                return [piece_of_rank(piece, rank)]
    found: list[IndexPiece] = []
    for pieces in ("pieces", "resident"):
        for rank, entry in entries.items():
            for piece in getattr(entry, pieces):
                region = piece_region(piece, shape)
                if not slabs(region, wanted, 1) or (
                    found and any(slabs(piece_region(other, shape), region, 1) for other in found)
                ):
                    continue
                found.append(piece_of_rank(piece, rank))
    return found
