"""Committed checkpoints made of records alone, without trainer or daemon, at any backend."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec

from ckptd.checkpoint import retention
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.unchanged import Described
from ckptd.format.digests import DIGEST_BYTES, digest_blocks, hex_digest
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.keys import Version, manifest_key, receipt_key, shard_key
from ckptd.format.names import piece_name
from ckptd.format.proof import prove
from ckptd.format.records import (
    Box,
    Layout,
    Manifest,
    Parent,
    Piece,
    Reference,
    ShardProof,
    Snapshot,
    Span,
    TensorEntry,
    encode,
    receipt_of,
)
from ckptd.format.remainder import remainder
from ckptd.format.shard import StoredPiece, block_bounds, block_count, file_order, header_digests, lay_out
from ckptd.format.tree import encode_tree
from ckptd.limits import BLOCK_BYTES_MAX
from ckptd.storage import Backend

LAUNCH = "builder"


@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor: all of it, a box or a range, or nothing (``data`` is None)."""

    name: str
    shape: tuple[int, ...]
    data: bytes | None
    dtype: str = "float32"
    box: Box | None = None
    span: Span | None = None
    per_rank: bool = False

    @property
    def piece_shape(self) -> tuple[int, ...]:
        if self.box is not None:
            return self.box.lengths
        return self.shape if self.span is None else (self.span.stop - self.span.start,)


@dataclass(frozen=True)
class State:
    """One rank's state: tensors by their final names, and the plain values of the tree."""

    tensors: Sequence[Held]
    tree: Mapping[str, Any] = field(default_factory=dict[str, Any])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class TensorRef:
    """A tensor's place in the tree."""

    name: str


def pattern(count: int, salt: int = 0) -> bytes:
    """``count`` bytes that differ from block to block."""
    unit = bytes((i * 31 + salt * 17 + 7) % 251 for i in range(251))
    return (unit * (count // 251 + 1))[:count]


def tensor(name: str, shape: tuple[int, ...], *, dtype: str = "float32", salt: int = 0, **more: Any) -> Held:
    """A whole tensor filled with a pattern."""
    return Held(name, shape, pattern(element_count(shape) * ITEM_BYTES[dtype], salt), dtype, **more)


def numbered(shape: tuple[int, ...], dtype: str) -> bytes:
    """A tensor whose every item holds its own flat number, as far as the item goes."""
    item = ITEM_BYTES[dtype]
    return b"".join((i % (1 << 8 * item)).to_bytes(item, "little") for i in range(element_count(shape)))


def flat_numbers(shape: tuple[int, ...], part: Box | Span | None) -> list[int]:
    """The flat number of each element of a part, in its order, found one by one."""
    if isinstance(part, Span):
        return list(range(part.start, part.stop))
    box = part or Box((0,) * len(shape), shape)
    found: list[int] = []
    for index in product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))):
        flat = 0
        for size, at in zip(shape, index, strict=True):
            flat = flat * size + at
        found.append(flat)
    return found


def cut(whole: bytes, shape: tuple[int, ...], dtype: str, part: Box | Span | None) -> bytes:
    """A part of a tensor, row-major and dense."""
    item = ITEM_BYTES[dtype]
    return b"".join(whole[i * item : (i + 1) * item] for i in flat_numbers(shape, part))


def chunk(size: int, number: int, count: int) -> tuple[int, int]:
    """Offset and length of one of ``count`` chunks of a dimension: all as long as the first, as far as it goes."""
    length = -(-size // count)
    start = min(number * length, size)
    return start, min(length, size - start)


def grid(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[Box]:
    """The boxes of a regular grid with so many chunks along each dimension; some may be empty."""
    cells = product(*(range(count) for count in counts))
    chunks = ([chunk(s, n, c) for s, n, c in zip(shape, cell, counts, strict=True)] for cell in cells)
    return [Box(tuple(o for o, _ in one), tuple(n for _, n in one)) for one in chunks]


def part_of(name: str, shape: tuple[int, ...], part: Box | Span | None, *, dtype: str = "int32") -> Held:
    """What a rank holds of a numbered tensor."""
    data = cut(numbered(shape, dtype), shape, dtype, part)
    box, span = (None, part) if isinstance(part, Span) else (part, None)
    return Held(name, shape, data, dtype, box=box, span=span)


def small_state(salt: int = 0) -> State:
    """A model of two tensors, of which one has several digest blocks, and some plain values."""
    return State(
        [
            tensor("model/weight", (700, 1000), salt=salt),
            tensor("model/bias", (3,), dtype="bfloat16", salt=salt),
            tensor("optimizer/exp_avg", (5, 7), dtype="float64", salt=salt, per_rank=True),
        ],
        {
            "model": {"weight": TensorRef("model/weight"), "bias": TensorRef("model/bias")},
            "optimizer": {"exp_avg": TensorRef("optimizer/exp_avg"), "lr": 0.1},
            "step": salt,
        },
    )


def _leaf(value: object, path: tuple[str, ...]) -> dict[str, Any] | None:
    return {"$": "tensor", "v": value.name} if isinstance(value, TensorRef) else None


def _layout(state: State) -> tuple[Layout, bytes]:
    """The layout and the shard's bytes."""
    pieces = [(held, held.data) for held in state.tensors if held.data is not None]
    counts: dict[str, int] = {}
    for held, _ in pieces:
        counts[held.name] = counts.get(held.name, 0) + 1
    numbers: dict[str, int] = {}
    stored: list[StoredPiece] = []
    for held, _ in pieces:
        number = numbers[held.name] = numbers.get(held.name, -1) + 1
        stored.append(StoredPiece(piece_name(held.name, number, counts[held.name]), held.dtype, held.piece_shape))
    laid = lay_out(stored)
    shard = laid.header + b"".join(pieces[i][1] for i in file_order(stored))
    entries: dict[str, TensorEntry] = {}
    for held in state.tensors:
        entries.setdefault(
            held.name,
            TensorEntry(dtype=held.dtype, name=held.name, per_rank=held.per_rank, pieces=(), shape=held.shape),
        )
    for (held, data), at in zip(pieces, laid.offsets, strict=True):
        piece = Piece(at=at, box=held.box, bytes=len(data), span=held.span)
        entry = entries[held.name]
        entries[held.name] = msgspec.structs.replace(entry, pieces=(*entry.pieces, piece))
    layout = Layout(
        aliases=dict(state.aliases),
        header_bytes=len(laid.header),
        shard_bytes=laid.size_bytes,
        tensors=tuple(entries.values()),
    )
    return layout, shard


async def write_rank(
    run: Run,
    version: Version,
    state: State,
    *,
    rank: int = 0,
    world: int = 1,
    parent: Version | None = None,
    launch: str = LAUNCH,
    attempt: str | None = None,
    metrics: Mapping[str, float | None] | None = None,
    refer: Callable[[Snapshot, Described], Awaitable[Sequence[Reference]]] | None = None,
) -> bytes:
    """A rank's shard and receipt; returns the receipt's bytes. ``refer``: what of it is not to be stored again."""
    layout, shard = _layout(state)
    snapshot = Snapshot(
        generation=version.generation,
        launch=launch,
        layout=msgspec.Raw(encode(layout)),
        metrics=dict(metrics or {}),
        parent=None if parent is None else Parent(generation=parent.generation, step=parent.step),
        parts=tuple(sorted({held.name.split("/")[0] for held in state.tensors} | set(state.tree))),
        rank=rank,
        run=run.id,
        step=version.step,
        tree=msgspec.Raw(msgspec.json.encode(encode_tree(dict(state.tree), _leaf))),
        world=world,
    )
    by_offset = sorted((p for e in layout.tensors for p in e.pieces), key=lambda p: (p.at, p.bytes))
    bounds = block_bounds(layout.header_bytes, [p.bytes for p in by_offset])
    blocks = digest_blocks(memoryview(shard), bounds)
    attempt = attempt or uuid.uuid4().hex
    references: Sequence[Reference] = ()
    digests = blocks[block_count(layout.header_bytes) * DIGEST_BYTES :]
    if refer is not None:
        references = await refer(snapshot, Described(version, encode(layout), digests, BLOCK_BYTES_MAX))
    if references:
        left = remainder(layout, references)
        shard = left.header + b"".join(shard[part.start : part.start + part.length] for part in left.runs)
        blocks = header_digests(left.header, BLOCK_BYTES_MAX) + digests
    proof = ShardProof(
        attempt=attempt,
        blocks=blocks,
        bytes=len(shard),
        checksum="",
        digest=hex_digest(blocks),
        key=shard_key(version, rank, world, attempt),
        references=tuple(references),
    )
    await run.backend.put(proof.key, shard)
    receipt = encode(receipt_of(proof, msgspec.Raw(encode(snapshot))))
    await run.backend.put(receipt_key(version, rank, world), receipt, if_absent=True)
    return receipt


async def commit(run: Run, receipts: Sequence[bytes]) -> Manifest:
    """Prove the receipts and put index and manifest."""
    proved = prove(receipts)
    for key, data in proved.objects.items():
        await run.backend.put(key, data, if_absent=True)
    await run.backend.put(manifest_key(proved.manifest.version), encode(proved.manifest), if_absent=True)
    return proved.manifest


async def open_generation(run: Run, *, world: int = 1, opened_from: Version | None = None) -> int:
    """The number of a new generation of the builder's launch."""
    record = await run.open_generation(launch=LAUNCH, world=world, opened_from=opened_from, host="builder", pid=1)
    return record.generation


async def make_checkpoint(
    run: Run,
    version: Version,
    states: State | Sequence[State] | None = None,
    *,
    parent: Version | None = None,
    metrics: Mapping[str, float | None] | None = None,
) -> Manifest:
    """A committed checkpoint, one state a rank. The generation is opened by :func:`open_generation` beforehand."""
    ranks = [small_state(version.step)] if states is None else [states] if isinstance(states, State) else list(states)
    receipts = [
        await write_rank(run, version, state, rank=rank, world=len(ranks), parent=parent, metrics=metrics)
        for rank, state in enumerate(ranks)
    ]
    return await commit(run, receipts)


async def make_run(run: Run, steps: Sequence[int], *, opened_from: Version | None = None) -> list[Version]:
    """A generation of one rank with small checkpoints at these steps."""
    generation = await open_generation(run, opened_from=opened_from)
    versions = [Version(step, generation) for step in steps]
    for version in versions:
        await make_checkpoint(run, version, parent=opened_from)
    return versions


async def retire(run: Run, keep: Keep, *, generation: int) -> retention.Outcome:
    """A pass of retention, which does not wait for listings that are late."""
    return await retention.apply(run, keep, generation=generation, grace_seconds=0.0)


# Damage


async def keys_of(backend: Backend, prefix: str = "") -> list[str]:
    """Every key there is."""
    return [info.key async for info in backend.scan(prefix)]


async def only_key(backend: Backend, prefix: str, ending: str) -> str:
    """The one key that starts and ends so."""
    (found,) = [key for key in await keys_of(backend, prefix) if key.endswith(ending)]
    return found


async def tamper(backend: Backend, key: str, change: Callable[[bytearray], object]) -> None:
    """Change an object behind everybody's back."""
    data = bytearray(await backend.get(key, limit_bytes=1 << 30))
    change(data)
    await backend.put(key, bytes(data))


def flip(at: int | bytes, bit: int = 0) -> Callable[[bytearray], None]:
    """Flips one bit: of the byte at that place, or of the first byte behind that text."""

    def change(data: bytearray) -> None:
        data[at if isinstance(at, int) else data.index(at) + len(at)] ^= 1 << bit

    return change
