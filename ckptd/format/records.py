"""The records of a run, as typed data: run, generation, snapshot, receipt, manifest, index, mark, lease, tombstone.

All are JSON objects whose first member is ``format`` and second ``kind``. Sizes are integers; byte strings are base64.
Unknown members are ignored; a member given twice, another kind and a later format version are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from ckptd.errors import FormatError, UnsupportedFormat
from ckptd.format.duplicates import refuse_duplicates
from ckptd.format.keys import GENERATION_MAX, RANK_MAX, STEP_MAX, Version
from ckptd.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    INTEGER_MAX,
    NAME_BYTES_MAX,
    PAGE_BYTES,
    TENSOR_DIMS_MAX,
)

FORMAT = 2
"""The highest there is. Records of most kinds are of 1; see :func:`newest_format`."""
FORMAT_OF_REFERENCES = 2
"""Of receipts with references, and of manifests over such. A reader of 1 would take them for damaged, and remove what
they need."""

Size = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]
Step = Annotated[int, msgspec.Meta(ge=0, le=STEP_MAX)]
Generation = Annotated[int, msgspec.Meta(ge=0, le=GENERATION_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=RANK_MAX)]
World = Annotated[int, msgspec.Meta(ge=1, le=RANK_MAX + 1)]
Token = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._=-]{1,128}\Z")]
"""An identifier: run, attempt."""
VersionName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{12}-g[0-9]{6}\Z")]
"""A checkpoint, as ``str(version)``."""
Text = Annotated[str, msgspec.Meta(max_length=NAME_BYTES_MAX)]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
ShardKey = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^checkpoints/[0-9]{12}-g[0-9]{6}/rank-[0-9]{5}-of-[0-9]{5,6}-[A-Za-z0-9._=-]{1,128}\.safetensors\Z"
    ),
]
Packed = bytes
"""Base64 in JSON. A name of its own, as records have a member called ``bytes``."""
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=TENSOR_DIMS_MAX)]


BlockBytes = Annotated[int, msgspec.Meta(ge=BLOCK_BYTES_MIN, le=BLOCK_BYTES_MAX, multiple_of=PAGE_BYTES)]


def _written(value: Any) -> Any:
    """A default that is written out all the same, also by a record that leaves out members at their default."""
    return msgspec.field(default_factory=lambda: value)


class Record(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The common head of every record."""

    format: Annotated[int, msgspec.Meta(ge=1)] = _written(1)


class Parent(msgspec.Struct, kw_only=True, frozen=True):
    """The checkpoint from which a generation was opened."""

    generation: Generation
    step: Step

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)


# What a large world has millions of is left out of garbage collection, which it cannot make cycles of anyway: a third
# of the time of a commit.


class Box(msgspec.Struct, frozen=True, gc=False):
    """A rectangular part of a tensor: ``offsets[d] <= index[d] < offsets[d] + lengths[d]``."""

    offsets: Shape
    lengths: Shape


class Span(msgspec.Struct, frozen=True, gc=False):
    """A flat range ``[start, stop)`` of a tensor's elements in row-major order."""

    start: Size
    stop: Size


class Piece(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, gc=False):
    """What a shard holds of a tensor. Neither box nor span: all of it."""

    at: Size
    """Byte offset in the shard."""
    box: Box | None = None
    bytes: Size
    span: Span | None = None


class TensorEntry(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, gc=False):
    """A tensor that a rank has seen, under its global shape, and the pieces of it that the rank saved: none, where
    other ranks own it."""

    dtype: Text
    name: Text
    per_rank: bool
    """The value is this rank's own and says nothing about other ranks' values of the same name."""
    pieces: tuple[Piece, ...]
    resident: tuple[Piece, ...] = ()
    """What the slot holds of it behind the shard: copies of parts that other ranks own and write. ``at`` counts from
    the slot's start."""
    shape: Shape


class Layout(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What depends on the structure of a rank's state only, and so is the same from save to save."""

    aliases: dict[Text, Text]
    """Further names of the same memory (tied weights) → the name under which it is stored."""
    header_bytes: Size
    """Where data starts in the shard."""
    resident_bytes: Size = 0
    """Where the resident pieces end in the slot; 0 where there are none."""
    shard_bytes: Size
    tensors: tuple[TensorEntry, ...]
    """In the order of their names' first appearance; the order of the data is that of ``Piece.at``."""


class Snapshot(Record, kw_only=True, frozen=True):
    """One rank's state at one step, as it lies in a slot beside the bytes of its shard."""

    kind: Literal["snapshot"] = _written("snapshot")
    check_replicas: bool = False
    """The daemon digests the resident pieces as well, and the commit compares them with what their owners wrote."""
    debug: bool = False
    """For a post-mortem: marked so before its receipt, and not restored by itself."""
    generation: Generation
    launch: Text
    layout: msgspec.Raw
    """A :class:`Layout`; see :func:`decode_layout`."""
    metrics: dict[Text, float | None]
    """What the training step reported; ``None`` for a value that is not finite."""
    parent: Parent | None
    parts: tuple[Text, ...]
    """The names at the top of the state."""
    pin: bool = _written(False)
    """Whoever commits it marks it as pinned."""
    rank: Rank
    run: Token
    step: Step
    tree: msgspec.Raw
    """The state tree: typed JSON of a dict of the state's parts."""
    world: World

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)


class Extent(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """Whole pieces that lie one behind the other in the slot as well as in an older shard."""

    at: Size
    """Byte offset in the older shard."""
    bytes: Size
    start: Size
    """Byte offset in the slot."""


class Reference(msgspec.Struct, kw_only=True, frozen=True):
    """The shard of another committed checkpoint, and what of it is part of this one."""

    bytes: Size
    """Of that shard."""
    extents: tuple[Extent, ...]
    """By ``start``."""
    key: ShardKey


class ShardProof(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A durable shard and the digests taken from the snapshot itself."""

    attempt: Token
    block_bytes: BlockBytes = BLOCK_BYTES_MAX
    """How long a block is at most."""
    blocks: Packed
    """16 bytes for each block of :func:`ckptd.format.shard.block_bounds`."""
    bytes: Size
    """Of the object: without what lies elsewhere."""
    checksum: Text
    """What the store verified on arrival (for S3 the CRC32C of each part), or empty."""
    digest: Hex
    """xxh3-128 of ``blocks``."""
    key: Text
    references: tuple[Reference, ...] = ()
    """Where the pieces lie that are not in the object, by key."""
    resident_blocks: Packed = b""
    """16 bytes for each block of the resident pieces, where the snapshot has them checked."""


class Receipt(Record, kw_only=True, frozen=True):
    """Proof that a rank's shard is durable. The first receipt put for a rank names the attempt that counts."""

    kind: Literal["receipt"] = _written("receipt")
    shard: ShardProof
    snapshot: msgspec.Raw
    """A :class:`Snapshot`, byte for byte as it lay in the slot."""


def receipt_of(shard: ShardProof, snapshot: msgspec.Raw) -> Receipt:
    """The receipt of a shard, in the format that its references call for."""
    return Receipt(format=FORMAT_OF_REFERENCES if shard.references else 1, shard=shard, snapshot=snapshot)


class Skipped(Record, kw_only=True, frozen=True):
    """In the place of a receipt: this rank does not take part, so the step will not be committed."""

    kind: Literal["skipped"] = _written("skipped")
    generation: Generation
    rank: Rank
    reason: Text
    run: Token
    step: Step


class ReceiptRef(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A receipt as its manifest vouches for it."""

    bytes: Size
    digest: Hex
    key: Text
    rank: Rank


class IndexPiece(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, gc=False):
    """A piece and the rank whose shard holds it."""

    at: Size
    box: Box | None = None
    bytes: Size
    rank: Rank
    span: Span | None = None


class RankRun(msgspec.Struct, frozen=True, gc=False):
    """The ranks ``range(start, stop, step)``; ``stop`` is one more than the last of them."""

    start: Rank
    stop: World
    step: World


class Grid(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """A tensor cut at the multiples of one length in each dimension: every cell is one box, or all of the tensor, on
    one rank. See :mod:`ckptd.format.grid`."""

    chunks: Shape
    """How long a cell is in each dimension; the last one may be shorter."""
    ranks: RankRun | Size
    """Whose shard holds each cell, in row-major order of the cells: a run, or the number of a list in ``rank_lists`` of
    the record that the entry lies in."""


class IndexEntry(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, gc=False):
    """A tensor that is one value for the whole world, and where all of its pieces lie."""

    dtype: Text
    grid: Grid | None = None
    """Where the pieces are a regular grid; then ``pieces`` is empty."""
    name: Text
    pieces: tuple[IndexPiece, ...]
    """Without empty ones."""
    shape: Shape


RankLists = tuple[tuple[Rank, ...], ...]
"""Lists of ranks that grids name by number."""


class ObjectRef(msgspec.Struct, kw_only=True, frozen=True):
    """An object that a manifest vouches for."""

    bytes: Size
    digest: Hex
    key: Text


class IndexRef(msgspec.Struct, kw_only=True, frozen=True):
    """A part of an index that lies in an object of its own."""

    bytes: Size
    digest: Hex
    first: Text
    key: Text
    last: Text


class Index(Record, kw_only=True, frozen=True):
    """A part of an index, in an object of its own."""

    kind: Literal["index"] = _written("index")
    rank_lists: RankLists = ()
    tensors: tuple[IndexEntry, ...]
    """Sorted by name."""


class Common(Record, kw_only=True, frozen=True):
    """What the state trees of all ranks have in common; see :mod:`ckptd.format.common_tree`."""

    kind: Literal["common"] = _written("common")
    aliases: dict[Text, Text]
    """Those of all ranks, without names for which ranks have different tensors."""
    tree: msgspec.Raw
    """A state tree, in which ``{"$":"per_rank"}`` stands for what differs."""


class ReceiptList(Record, kw_only=True, frozen=True):
    """A part of a manifest's receipts, in an object of its own."""

    kind: Literal["receipts"] = _written("receipts")
    receipts: tuple[ReceiptRef, ...]
    """In order of rank, and without a gap."""


class Manifest(Record, kw_only=True, frozen=True):
    """The root of a checkpoint: it exists if and only if the checkpoint is committed.

    A pure function of the receipts: racing committers write equal bytes.
    """

    kind: Literal["manifest"] = _written("manifest")
    bytes: Size
    """Of all shards together, as objects."""
    common: ObjectRef | None = None
    """What the state trees have in common; ``None`` where there is one rank."""
    generation: Generation
    index: tuple[IndexEntry, ...] | None
    """Sorted by name; ``None`` where it lies in the objects of ``index_parts``."""
    index_parts: tuple[IndexRef, ...]
    launch: Text
    metrics: dict[Text, float | None]
    """Rank 0's."""
    parent: Parent | None
    parts: tuple[Text, ...]
    """The names at the top of the state, sorted, over all ranks."""
    rank_lists: RankLists = ()
    """Of ``index``."""
    receipt_parts: tuple[ObjectRef, ...] = ()
    """Where there are more than :data:`ckptd.limits.RECEIPTS_INLINE_MAX` ranks: so many in each, in order of rank."""
    receipts: tuple[ReceiptRef, ...]
    """One for each rank, in order of rank; empty where they lie in ``receipt_parts``."""
    referenced_bytes: Size = 0
    """Of pieces that lie in shards of other checkpoints."""
    references: tuple[VersionName, ...] = ()
    """Those checkpoints, sorted."""
    run: Token
    step: Step
    world: World

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)

    @property
    def held_bytes(self) -> int:
        """Of all shards together, if nothing lay elsewhere."""
        return self.bytes + self.referenced_bytes


class Run(Record, kw_only=True, frozen=True):
    """Whose records these are. Put if absent, once."""

    kind: Literal["run"] = _written("run")
    run: Token


class GenerationRecord(Record, kw_only=True, frozen=True):
    """One life of the run. Put if absent: the number is the fencing token."""

    kind: Literal["generation"] = _written("generation")
    generation: Generation
    host: Text
    launch: Text
    opened_from: Parent | None
    pid: Size
    run: Token
    world: World


class Mark(Record, kw_only=True, frozen=True):
    """A verdict on a checkpoint. Append-only: of one kind the latest holds."""

    kind: Literal["mark"] = _written("mark")
    by: Text
    mark: Literal["verified", "suspect", "pinned", "unpinned", "unhealthy", "revoked", "debug"]
    reason: Text
    version: VersionName


class Lease(Record, kw_only=True, frozen=True):
    """A claim that expires by the store's clock: a live writer, a reader, a reference in flight."""

    kind: Literal["lease"] = _written("lease")
    holder: Text
    """Host, process id and launch id, for the message that refuses somebody else."""
    process: Text
    """Boot, PID namespace, process id and start time of the holder, so that others on its machine see at once that it
    died; empty where that is not known."""
    purpose: Literal["writer", "reader", "reference"]
    version: VersionName | None


class Tombstone(Record, kw_only=True, frozen=True):
    """A deletion that has been announced."""

    kind: Literal["tombstone"] = _written("tombstone")
    reason: Text
    version: VersionName


class _Head(msgspec.Struct):
    format: int
    kind: str


AnyRecord = TypeVar("AnyRecord", bound=Record)
_NEWEST_FORMATS = {"receipt": FORMAT_OF_REFERENCES, "manifest": FORMAT_OF_REFERENCES}


def newest_format(kind: str) -> int:
    """The highest format of records of a kind."""
    return _NEWEST_FORMATS.get(kind, 1)


def kind_of(record: type[Record]) -> str:
    """What stands as ``kind`` in such a record."""
    return cast(str, cast(Callable[[], object], msgspec.structs.fields(record)[1].default_factory)())


def encode(record: msgspec.Struct) -> bytes:
    """One spelling per record, so that equal records are equal bytes."""
    return msgspec.json.encode(record, order="deterministic")


def decode(data: bytes | memoryview, kind: type[AnyRecord]) -> AnyRecord:
    """A record of the given type. Members of type :class:`msgspec.Raw` keep ``data`` alive and are not looked into.

    Raises :class:`UnsupportedFormat` for a later format version, :class:`FormatError` for everything else that is not
    such a record, whatever the bytes.
    """
    found = _as_written(data, kind)
    if found is not None:
        return found
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format > (newest := newest_format(head.kind)):
            raise UnsupportedFormat(
                f"written by a newer release: format version {head.format}, and this one reads {newest}",
                hint="upgrade ckptd",
            )
        wanted = kind_of(kind)
        if head.kind != wanted:
            raise FormatError(f"expected a {wanted}, found a {head.kind[:40]!r}")
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise FormatError(f"not a record of the format: {error}") from None
    refuse_duplicates(data, encode(record))
    return record


def _as_written(data: bytes | memoryview, kind: type[AnyRecord]) -> AnyRecord | None:
    """The record, where ``data`` is just what :func:`encode` makes of it, as nearly always: it is of that kind, and
    has no member twice. A receipt has many MB, and is looked through once. ``None`` for a later version too."""
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None
    return record if record.format <= newest_format(kind_of(kind)) and encode(record) == bytes(data) else None


def decode_layout(raw: msgspec.Raw) -> Layout:
    """Raises :class:`FormatError`."""
    try:
        layout = msgspec.json.decode(raw, type=Layout)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise FormatError(f"malformed layout: {error}") from None
    refuse_duplicates(memoryview(raw), encode(layout))
    return layout
