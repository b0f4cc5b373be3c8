"""From the receipts of all ranks to the manifest: the proof that a commit is (promise P4).

A pure function, so that any daemon that sees all receipts computes the same bytes. Receipts are taken in one after the
other and let go: memory grows with the ranks and with the tensors, not with their product. A few may be asked for
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ckptd.errors import CoverageError
from ckptd.format import index
from ckptd.format.common_tree import Merge
from ckptd.format.cover import check_layout, residents_in_slot_order
from ckptd.format.derived import Derived, DerivedKept
from ckptd.format.digests import DIGEST_BYTES, hex_digest
from ckptd.format.fingerprints import Fingerprint, fingerprints
from ckptd.format.gather import Gathered
from ckptd.format.keys import Version, common_key, index_key, receipt_key, receipts_key, shard_key
from ckptd.format.records import (
    Common,
    IndexRef,
    Layout,
    Manifest,
    ObjectRef,
    Piece,
    Receipt,
    ReceiptList,
    ReceiptRef,
    ShardProof,
    Snapshot,
    decode,
    decode_layout,
    encode,
)
from ckptd.format.references import MISFIT, header_bytes, holder_of, referenced_bytes, stretches
from ckptd.format.shard import block_count
from ckptd.limits import RECEIPTS_INLINE_MAX

_derived = DerivedKept()
_AGREED = ("run", "step", "generation", "world", "launch", "parent", "check_replicas")
"""What snapshots of one checkpoint have in common."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit puts: the objects beside the manifest first, the manifest last."""

    manifest: Manifest
    objects: Mapping[str, bytes]
    """Key → bytes: parts of the index and of the list of receipts, and what the state trees have in common."""
    pinned: bool
    """A rank asked for it to be kept."""


def prove(receipts: Sequence[bytes], *, early: bool = False) -> Commit:
    """The commit that these receipts, one per rank in order of rank, add up to.

    ``early``: as the first release committed, which knew neither grids, nor values that are equal on all ranks, nor
    what state trees have in common. For checkpoints that lie there so.

    Raises :class:`CoverageError` where they do not belong together, or a tensor that any rank has seen is not covered
    exactly once; :class:`FormatError` where one cannot be read.
    """
    proof = Proof(len(receipts), early=early)
    for data in receipts:
        proof.add(data)
    while ranks := proof.questions():
        for rank in ranks:
            proof.look(rank, receipts[rank])
    return proof.commit()


class Proof:
    """:func:`prove` for whoever does not have all receipts at hand: :meth:`add` each in order of rank, then
    :meth:`look` at those that :meth:`questions` names, until it names none."""

    def __init__(self, receipts: int, *, early: bool = False) -> None:
        """``receipts``: how many there are."""
        if not receipts:
            raise CoverageError("no receipts")
        self._count = receipts
        self._early = early
        self._first: Snapshot | None = None
        self._gathered = Gathered(early=early)
        self._merge = Merge()
        self._refs: list[ReceiptRef] = []
        self._bytes = self._referenced_bytes = 0
        self._references: set[Version] = set()
        self._parts: set[str] = set()
        self._pinned = False
        self._format = 1
        self._derived: Derived | None = None
        self._to_derive: tuple[msgspec.Raw, Layout, list[Piece], int] | None = None

    def add(self, data: bytes) -> None:
        """The receipt of the next rank. Raises as :func:`prove`."""
        rank = len(self._refs)
        receipt = decode(data, Receipt)
        snapshot = decode(receipt.snapshot, Snapshot)
        self._check_belongs(rank, snapshot)
        if not self._add_derived(receipt.shard, snapshot):
            self._add_layout(rank, receipt.shard, snapshot)
        self._bytes += receipt.shard.bytes
        self._referenced_bytes += referenced_bytes(receipt.shard)
        self._references.update(holder_of(reference.key) for reference in receipt.shard.references)
        self._parts.update(snapshot.parts)
        self._pinned = self._pinned or snapshot.pin
        self._format = max(self._format, receipt.format)
        key = receipt_key(snapshot.version, rank, snapshot.world)
        self._refs.append(ReceiptRef(bytes=len(data), digest=hex_digest(data), key=key, rank=rank))

    def _add_layout(self, rank: int, shard: ShardProof, snapshot: Snapshot) -> None:
        layout, pieces = _checked_layout(shard, snapshot)
        own = {piece.at for entry in layout.tensors if entry.per_rank for piece in entry.pieces}
        residents = _residents(layout, shard) if snapshot.check_replicas else None
        wanted = own if residents is None else None
        self._gathered.add(rank, layout, _prints(layout, pieces, shard, wanted), residents)
        if not self._early:
            self._merge.add(snapshot.tree, layout.aliases)
        if self._is_plain(shard, snapshot):
            self._to_derive = snapshot.layout, layout, pieces, shard.block_bytes

    def _is_plain(self, shard: ShardProof, snapshot: Snapshot) -> bool:
        """Whether the layout alone says where everything lies, and nobody else has a part in it."""
        return self._count == 1 and not (self._early or snapshot.check_replicas or shard.references)

    def _add_derived(self, shard: ShardProof, snapshot: Snapshot) -> bool:
        """Whether what follows from the layout is known already; then its receipt is checked against that."""
        if not self._is_plain(shard, snapshot):
            return False
        known = self._derived = _derived.get(snapshot.layout, shard.block_bytes)
        if known is None:
            return False
        try:
            if shard.bytes != known.shard_bytes:
                raise CoverageError(MISFIT)
            _check_digests(shard, block_count(known.header_bytes, shard.block_bytes) + known.piece_blocks, 0)
            _check_place(shard, snapshot)
        except CoverageError as error:
            raise CoverageError(f"rank {snapshot.rank}: {error}") from None
        self._merge.add(snapshot.tree, known.aliases)
        return True

    def questions(self) -> list[int]:
        """The ranks whose receipts are to be looked at again; none in the end."""
        return self._gathered.questions()

    def look(self, rank: int, data: bytes) -> None:
        """A receipt again, the same bytes as before."""
        if hex_digest(data) != self._refs[rank].digest:
            raise CoverageError(f"the receipt of rank {rank} has changed")
        receipt = decode(data, Receipt)
        layout, pieces = _checked_layout(receipt.shard, decode(receipt.snapshot, Snapshot))
        self._gathered.answer(rank, layout, _prints(layout, pieces, receipt.shard, None))

    def commit(self) -> Commit:
        """Once all receipts are there and there is no question left. Raises :class:`CoverageError`."""
        first = self._first
        if first is None or len(self._refs) != self._count:
            raise CoverageError(f"{len(self._refs)} of {self._count} receipts")
        version, objects = first.version, dict[str, bytes]()
        split = self._split_index()
        index_parts: list[IndexRef] = []
        for number, (data, first_name, last_name) in enumerate(split.parts):
            ref = _put(objects, index_key(version, number), data)
            index_parts.append(
                IndexRef(bytes=ref.bytes, digest=ref.digest, first=first_name, key=ref.key, last=last_name)
            )
        receipts, receipt_parts = self._split_receipts(version, objects)
        manifest = Manifest(
            bytes=self._bytes,
            common=self._common(first, objects),
            format=self._format,
            generation=first.generation,
            index=split.inline,
            index_parts=tuple(index_parts),
            launch=first.launch,
            metrics=first.metrics,
            parent=first.parent,
            parts=tuple(sorted(self._parts)),
            rank_lists=split.rank_lists,
            receipt_parts=receipt_parts,
            receipts=receipts,
            referenced_bytes=self._referenced_bytes,
            references=tuple(sorted(map(str, self._references))),
            run=first.run,
            step=first.step,
            world=first.world,
        )
        return Commit(manifest, objects, self._pinned)

    def _split_index(self) -> index.SplitIndex:
        if self._derived is not None:
            return self._derived.index
        found = index.split(self._gathered.indexed())
        if self._to_derive is not None:
            raw, layout, pieces, block_bytes = self._to_derive
            counted = sum([block_count(piece.bytes, block_bytes) for piece in pieces])
            made = Derived(layout.aliases, layout.shard_bytes, layout.header_bytes, counted, found)
            _derived.keep(raw, block_bytes, made)
        return found

    def _check_belongs(self, rank: int, snapshot: Snapshot) -> None:
        first = self._first
        if first is None:
            first = self._first = snapshot
            if self._count != first.world:
                raise CoverageError(f"{self._count} receipts for a world of {first.world} ranks")
        if snapshot.rank != rank:
            raise CoverageError(f"the receipt of rank {rank} says that it is of rank {snapshot.rank}")
        for field in _AGREED:
            mine, theirs = getattr(snapshot, field), getattr(first, field)
            if mine != theirs:
                raise CoverageError(f"ranks 0 and {rank} disagree on {field}: {theirs!r} and {mine!r}")

    def _common(self, first: Snapshot, objects: dict[str, bytes]) -> ObjectRef | None:
        if first.world == 1 or self._early:
            return None
        common = Common(aliases=self._merge.aliases(self._gathered.by_name), tree=self._merge.tree)
        return _put(objects, common_key(first.version), encode(common))

    def _split_receipts(
        self, version: Version, objects: dict[str, bytes]
    ) -> tuple[tuple[ReceiptRef, ...], tuple[ObjectRef, ...]]:
        refs, each = self._refs, RECEIPTS_INLINE_MAX
        if len(refs) <= each or self._early:
            return tuple(refs), ()
        lists = [ReceiptList(receipts=tuple(refs[start : start + each])) for start in range(0, len(refs), each)]
        return (), tuple(_put(objects, receipts_key(version, i), encode(part)) for i, part in enumerate(lists))


def _put(objects: dict[str, bytes], key: str, data: bytes) -> ObjectRef:
    objects[key] = data
    return ObjectRef(bytes=len(data), digest=hex_digest(data), key=key)


def _prints(
    layout: Layout, pieces: Sequence[Piece], shard: ShardProof, wanted: set[int] | None
) -> dict[int, Fingerprint]:
    """The fingerprints of the shard's pieces, by where they lie; only the ``wanted`` ones where that is given."""
    if wanted is not None and not wanted:
        return {}
    header_blocks = block_count(header_bytes(layout, shard), shard.block_bytes)
    return fingerprints(pieces, shard.blocks, header_blocks, shard.block_bytes, wanted)


def _residents(layout: Layout, shard: ShardProof) -> dict[int, Fingerprint]:
    return fingerprints(residents_in_slot_order(layout), shard.resident_blocks, 0, shard.block_bytes)


def _checked_layout(shard: ShardProof, snapshot: Snapshot) -> tuple[Layout, list[Piece]]:
    """A rank's layout, sound in itself and in keeping with the receipt, and its pieces in file order."""
    layout = decode_layout(snapshot.layout)
    try:
        pieces = check_layout(layout)
        check_proof_fits(shard, layout, pieces, check_replicas=snapshot.check_replicas)
        _check_place(shard, snapshot)
    except CoverageError as error:
        raise CoverageError(f"rank {snapshot.rank}: {error}") from None
    return layout, pieces


def check_proof_fits(shard: ShardProof, layout: Layout, pieces: Sequence[Piece], *, check_replicas: bool) -> None:
    """Raise :class:`CoverageError` unless sizes, references and digests of a receipt fit its layout."""
    cut = shard.block_bytes
    stretches(layout, pieces, shard)
    blocks = block_count(header_bytes(layout, shard), cut) + sum([-(-piece.bytes // cut) for piece in pieces])
    residents = residents_in_slot_order(layout) if check_replicas else []
    resident_blocks = sum(block_count(piece.bytes, cut) for piece in residents)
    _check_digests(shard, blocks, resident_blocks)


def _check_place(shard: ShardProof, snapshot: Snapshot) -> None:
    if shard.key != shard_key(snapshot.version, snapshot.rank, snapshot.world, shard.attempt):
        raise CoverageError(f"the receipt's shard lies at {shard.key[:200]}, which is not its place")


def _check_digests(shard: ShardProof, blocks: int, resident_blocks: int) -> None:
    """Unless there are as many as there must be, and add up."""
    promised = len(shard.blocks), len(shard.resident_blocks)
    if promised != (blocks * DIGEST_BYTES, resident_blocks * DIGEST_BYTES):
        raise CoverageError(MISFIT)
    if hex_digest(shard.blocks) != shard.digest:
        raise CoverageError("the receipt's digests do not add up")
