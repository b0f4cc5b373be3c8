"""Who a trainer without torch says that it is, and what it fills a slot with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptd.arena.memory import pages
from ckptd.format.keys import Version
from ckptd.format.records import GenerationRecord, Layout, Parent, Piece, Snapshot, Span, TensorEntry, encode
from ckptd.format.shard import StoredPiece, lay_out
from ckptd.wire.messages import TierOfRun

RUN = "testrun"


@dataclass(frozen=True)
class Content:
    """What a slot is filled with."""

    shard: bytes
    doc: bytes
    version: Version
    resident: bytes = b""
    """What lies in the slot from the first page behind the shard on."""

    @property
    def held_bytes(self) -> int:
        return pages(len(self.shard)) + len(self.resident) if self.resident else len(self.shard)


@dataclass(frozen=True)
class Member:
    """Who the trainer says that it is."""

    url: str
    rank: int = 0
    world: int = 1
    generation: int = 1
    launch: str = "launch#0"
    parent: Parent | None = None
    takeover: bool = False
    keep_last: int = 100
    far_url: str = ""
    """A further tier."""
    far_keep_last: int = 100
    far_every_steps: int | None = None
    shared: bool = True
    """Whether all ranks see the nearest tier."""
    loader: dict[str, Any] | None = None
    load_every: int = 1
    incremental: bool = True
    storage_options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def record(self) -> GenerationRecord:
        return GenerationRecord(
            generation=self.generation,
            host="host",
            launch=self.launch,
            opened_from=self.parent,
            pid=1,
            run=RUN,
            world=self.world,
        )

    @property
    def tiers(self) -> tuple[TierOfRun, ...]:
        options = self.storage_options
        near = TierOfRun(
            url=self.url,
            keep={"last": self.keep_last},
            storage_options=options if self.url.startswith("s3") or not self.far_url.startswith("s3") else {},
            shared=self.shared,
        )
        far = TierOfRun(
            url=self.far_url,
            keep={"last": self.far_keep_last},
            storage_options=options,
            every_steps=self.far_every_steps,
        )
        return (near, far) if self.far_url else (near,)

    def content(self, step: int, size: int = 300_000, *, salt: int = 0) -> Content:
        """A snapshot: one tensor of the run, of which each rank has ``size`` bytes, and one of the rank's own."""
        pieces = [StoredPiece("model/w", "uint8", (size,)), StoredPiece("rng", "int64", (3,))]
        laid = lay_out(pieces)
        seed = f"{step}.{self.generation}.{self.rank}.{salt}.".encode()
        data = (seed * (size // len(seed) + 1))[:size]
        own = bytes([step % 256]) * 24
        shard = bytearray(laid.size_bytes)
        shard[: len(laid.header)] = laid.header
        for offset, value in zip(laid.offsets, (data, own), strict=True):
            shard[offset : offset + len(value)] = value
        span = Span(self.rank * size, (self.rank + 1) * size)
        whole = TensorEntry(
            dtype="uint8",
            name="model/w",
            per_rank=False,
            pieces=(Piece(at=laid.offsets[0], bytes=size, span=span),),
            shape=(size * self.world,),
        )
        mine = TensorEntry(
            dtype="int64", name="rng", per_rank=True, pieces=(Piece(at=laid.offsets[1], bytes=24),), shape=(3,)
        )
        layout = Layout(aliases={}, header_bytes=len(laid.header), shard_bytes=laid.size_bytes, tensors=(whole, mine))
        snapshot = Snapshot(
            generation=self.generation,
            launch=self.launch,
            layout=msgspec.Raw(encode(layout)),
            metrics={"loss": 1.5},
            parent=self.parent,
            parts=("model", "rng"),
            rank=self.rank,
            run=RUN,
            step=step,
            tree=msgspec.Raw(b'{"$":"dict","v":[]}'),
            world=self.world,
        )
        return Content(bytes(shard), encode(snapshot), snapshot.version)
