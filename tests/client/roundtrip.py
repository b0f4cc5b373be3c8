"""A checkpoint in memory: a capture laid out, copied and described as staging and the receipt do it, and read again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from ckptd.checkpoint.plan import Want
from ckptd.checkpoint.tensors import of_rank
from ckptd.format.cover import check_layout
from ckptd.format.dtypes import ITEM_BYTES
from ckptd.format.records import Layout, Piece, TensorEntry, decode_layout, encode
from ckptd.format.shard import StoredPiece, lay_out
from ckptd.limits import BLOCK_BYTES_MAX
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import Capture, Prepared, State
from ckptd_client.capture.selection import EVERYTHING, Selection
from ckptd_client.capture.stored import Amount, Described, InCommon, Ranks, Wanted
from ckptd_client.gather import FromMemory, gather


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stored:
    """A shard's bytes, the layout and the tree, each as bytes."""

    shard: bytearray
    layout_bytes: bytes
    tree: bytes
    parts: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        return decode_layout(msgspec.Raw(self.layout_bytes))

    def read(self, name: str) -> torch.Tensor:
        """The piece of a tensor that this rank saved, in the dtype and shape in which it was saved."""
        (entry,) = [entry for entry in self.layout.tensors if entry.name == name]
        (piece,) = entry.pieces
        shape = piece.box.lengths if piece.box is not None else entry.shape
        if not piece.bytes:
            return torch.empty(shape, dtype=getattr(torch, entry.dtype))
        data = torch.frombuffer(self.shard, dtype=torch.uint8, count=piece.bytes, offset=piece.at)
        return data.view(getattr(torch, entry.dtype)).view(shape)

    @property
    def data_bytes(self) -> int:
        return self.layout.shard_bytes - self.layout.header_bytes


class Reread:
    """What was stored, as a restore on the same ranks sees it."""

    def __init__(self, stored: Stored, ranks: Ranks) -> None:
        self.ranks = ranks
        self.amount = Amount()
        self.tree = stored.tree
        self.aliases = stored.layout.aliases
        self._shard = memoryview(stored.shard)
        self._entries = {entry.name: entry for entry in stored.layout.tensors}

    def describe(self, name: str) -> Described | None:
        entry = self._entries.get(name)
        return None if entry is None else Described(name, entry.dtype, entry.shape)

    def fetch(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        wants = [
            Want(
                name=each.tensor.name,
                dtype=each.tensor.dtype,
                shape=each.tensor.shape,
                region=each.region,
                pieces=of_rank(self._entries[each.tensor.name], 0).own or (),
            )
            for each in wanted
        ]
        memory = {0: self._shard}
        found, self.amount = run_blocking(
            gather(wants, memory, FromMemory(memory), {0: BLOCK_BYTES_MAX}, lambda _: None)
        )
        return found

    def in_common(self) -> InCommon:
        return InCommon(self.tree, self.aliases)

    def of_each_rank(self, part: str) -> None:
        return None


def store(capture: Capture) -> Stored:
    """Copy what was captured, as it is now."""
    owned = [leaf for leaf in capture.leaves if leaf.tensor.numel() or (leaf.box is None and leaf.span is None)]
    pieces = [StoredPiece(leaf.name, dtype_name(leaf.tensor), tuple(leaf.tensor.shape)) for leaf in owned]
    shard_layout = lay_out(pieces)
    shard = bytearray(shard_layout.size_bytes)
    shard[: len(shard_layout.header)] = shard_layout.header
    held: dict[str, tuple[Piece, ...]] = {}
    for leaf, stored, at in zip(owned, pieces, shard_layout.offsets, strict=True):
        if stored.size_bytes:
            room = torch.frombuffer(shard, dtype=torch.uint8, count=stored.size_bytes, offset=at)
            room.view(leaf.tensor.dtype).view(stored.shape).copy_(leaf.tensor)
        held[leaf.name] = (Piece(at=at, box=leaf.box, bytes=stored.size_bytes, span=leaf.span),)
    entries = [
        TensorEntry(
            dtype=dtype_name(leaf.tensor),
            name=leaf.name,
            per_rank=leaf.per_rank,
            pieces=held.get(leaf.name, ()),
            shape=leaf.shape,
        )
        for leaf in capture.leaves
    ]
    layout = Layout(
        aliases=capture.aliases,
        header_bytes=len(shard_layout.header),
        shard_bytes=shard_layout.size_bytes,
        tensors=tuple(entries),
    )
    assert all(entry.dtype in ITEM_BYTES for entry in entries)
    check_layout(layout)
    return Stored(shard, encode(layout), capture.tree, capture.tops)


def save(state: Mapping[str, object], *, rng: bool = False, rank: int = 0, world: int = 1) -> Stored:
    return store(State(state, world=world, rng=rng).capture())


def prepare(
    stored: Stored,
    state: Mapping[str, object],
    *,
    strict: bool = True,
    rng: bool = False,
    rank: int = 0,
    world: int = 1,
    saved_world: int = 0,
    identity: str = "",
    selection: Selection = EVERYTHING,
) -> Prepared:
    live = State(state, world=world, rng=rng, rank=rank)
    ranks = Ranks(rank, world, saved_world or world, identity)
    return live.prepare(Reread(stored, ranks), strict=strict, selection=selection)


def restore(
    stored: Stored,
    state: Mapping[str, object],
    *,
    strict: bool = True,
    rng: bool = False,
    rank: int = 0,
    world: int = 1,
    saved_world: int = 0,
    identity: str = "",
) -> Prepared:
    """Prepare and apply. ``saved_world``: the ranks that saved, where they were as many as ``world`` if not given.
    ``identity``: the checkpoint's."""
    prepared = prepare(
        stored, state, strict=strict, rng=rng, rank=rank, world=world, saved_world=saved_world, identity=identity
    )
    prepared.apply()
    return prepared


def assert_same(one: Stored, other: Stored) -> None:
    """Two checkpoints are identical: tree, layout and every byte."""
    assert one.tree == other.tree
    assert one.layout == other.layout
    assert one.shard == other.shard


def assert_fixed_point(state: Mapping[str, object], fresh: Mapping[str, object], *, rng: bool = False) -> Stored:
    """Saving what was restored gives the checkpoint again."""
    stored = save(state, rng=rng)
    restore(stored, fresh, rng=rng)
    assert_same(stored, save(fresh, rng=rng))
    return stored


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def capture(state: Mapping[str, object], *, rng: bool = False) -> Capture:
    return State(state, world=1, rng=rng).capture()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal only where every bit is."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
