"""``python -m bench.scale``: what a commit, a listing and one rank's restore cost as the world grows.

Receipts are simulated, made as they are asked for: every tensor cut by rows over all ranks, as FSDP does, some values
of each rank's own, a state tree that differs in one leaf. Each world runs in a process of its own, so that its memory
is its own. No shard is read: what is measured are the records. Times are of the processor, as nothing here waits.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from ckptd.checkpoint.listing import list_run
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.run import Run
from ckptd.format import keys
from ckptd.format.digests import DIGEST_BYTES, hex_digest
from ckptd.format.keys import Version
from ckptd.format.proof import Proof
from ckptd.format.records import (
    Box,
    Layout,
    Piece,
    Receipt,
    ShardProof,
    Snapshot,
    TensorEntry,
    encode,
)
from ckptd.format.records import Run as RunRecord
from ckptd.limits import BLOCK_BYTES_WRITTEN, PAGE_BYTES
from ckptd_backends.memory import MemoryBackend
from ckptd_backends.wrappers.base import Wrapper

RESULTS = Path(__file__).parent / "results" / "scale.json"
VERSION = Version(1000, 1)
ROW_BYTES = 1024
"""Of each rank's row of a tensor."""
SPLIT = 10**9
"""Stands for a rank where text is made into a template; no other number is like it."""


@dataclass(frozen=True)
class World:
    """A checkpoint of so many ranks and tensors, whose receipts are made when they are wanted."""

    ranks: int
    tensors: int

    @cached_property
    def _template(self) -> list[bytes]:
        """A layout, cut where the rank's number stands."""
        header = PAGE_BYTES * 64
        row = Box((SPLIT, 0), (1, ROW_BYTES))
        entries = [
            TensorEntry(
                dtype="uint8",
                name=f"model/layers.{i}.weight",
                per_rank=False,
                pieces=(Piece(at=header + i * ROW_BYTES, box=row, bytes=ROW_BYTES),),
                shape=(self.ranks, ROW_BYTES),
            )
            for i in range(self.tensors)
        ]
        start = header + self.tensors * ROW_BYTES
        own = [
            TensorEntry(
                dtype="uint8",
                name=f"rng/{i}",
                per_rank=True,
                pieces=(Piece(at=start + i * 16, bytes=16),),
                shape=(16,),
            )
            for i in range(4)
        ]
        layout = Layout(
            aliases={"model/tied": "model/layers.0.weight"},
            header_bytes=header,
            shard_bytes=start + len(own) * 16,
            tensors=(*entries, *own),
        )
        return encode(layout).split(b"%d" % SPLIT)

    @cached_property
    def shard_bytes(self) -> int:
        """Of each rank's shard."""
        return msgspec.json.decode(b"0".join(self._template), type=Layout).shard_bytes

    @cached_property
    def _blocks(self) -> tuple[bytes, str]:
        header_blocks = -(-PAGE_BYTES * 64 // BLOCK_BYTES_WRITTEN)
        blocks = bytes(range(DIGEST_BYTES)) * (header_blocks + self.tensors + 4)
        return blocks, hex_digest(blocks)

    def receipt(self, rank: int) -> bytes:
        """The receipt of a rank."""
        blocks, digest = self._blocks
        tree = {"$": "dict", "v": [["model", [0] * self.tensors], ["rng", {"$": "dict", "v": [["seed", rank]]}]]}
        snapshot = Snapshot(
            generation=VERSION.generation,
            launch="scale",
            layout=msgspec.Raw((b"%d" % rank).join(self._template)),
            metrics={"loss": 0.5},
            parent=None,
            parts=("model", "rng"),
            rank=rank,
            run="scale",
            step=VERSION.step,
            tree=msgspec.Raw(msgspec.json.encode(tree)),
            world=self.ranks,
        )
        shard = ShardProof(
            attempt="a",
            block_bytes=BLOCK_BYTES_WRITTEN,
            blocks=blocks,
            bytes=self.shard_bytes,
            checksum="",
            digest=digest,
            key=keys.shard_key(VERSION, rank, self.ranks, "a"),
        )
        return encode(Receipt(shard=shard, snapshot=msgspec.Raw(encode(snapshot))))


class Simulated(Wrapper):
    """A store that makes receipts when they are asked for, and counts what is read."""

    def __init__(self, world: World) -> None:
        super().__init__(MemoryBackend(f"memory://scale-{world.ranks}"))
        self._ranks = {keys.receipt_key(VERSION, rank, world.ranks): rank for rank in range(world.ranks)}
        self._world = world
        self.requests = self.bytes_read = 0

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        rank = self._ranks.get(key)
        data = await super().get(key, limit_bytes=limit_bytes) if rank is None else self._world.receipt(rank)
        self.requests += 1
        self.bytes_read += len(data)
        return data


@dataclass(frozen=True)
class Cost:
    """What one thing costs. Zeros where a column does not apply."""

    seconds: float = 0.0
    requests: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Measured:
    """One world."""

    ranks: int
    tensors: int
    receipt_bytes: int
    making_seconds: float
    """Of receipts, which no real commit does; not in ``commit``."""
    commit: Cost
    """``bytes``: of receipts read. Each is read once, so there is one request a rank."""
    written_bytes: int
    """The manifest and what it names, receipts aside."""
    manifest_bytes: int
    peak_mib: float
    """Of memory, of the commit."""
    listing: Cost
    restore: Cost
    """One rank of three quarters as many, which wants its rows of every tensor: what it reads before any shard."""


def measure(world: World) -> Measured:
    """In this process; its peak of memory is then taken."""
    making = commit_seconds = 0.0
    size = 0
    proof = Proof(world.ranks)
    for data, made in _receipts(world):
        making += made
        size += len(data)
        began = time.process_time()
        proof.add(data)
        commit_seconds += time.process_time() - began
    began = time.process_time()
    again = proof.questions()
    for rank in again:
        proof.look(rank, world.receipt(rank))
    commit = proof.commit()
    manifest = encode(commit.manifest)
    commit_seconds += time.process_time() - began
    del proof
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    objects = {**commit.objects, keys.manifest_key(VERSION): manifest}
    found = Measured(
        ranks=world.ranks,
        tensors=world.tensors,
        receipt_bytes=size // world.ranks,
        making_seconds=making,
        commit=Cost(commit_seconds, world.ranks + len(again), size),
        written_bytes=sum(map(len, objects.values())),
        manifest_bytes=len(manifest),
        peak_mib=peak,
        listing=Cost(),
        restore=Cost(),
    )
    return asyncio.run(_read(world, objects, found))


def _receipts(world: World) -> Iterator[tuple[bytes, float]]:
    for rank in range(world.ranks):
        began = time.process_time()
        data = world.receipt(rank)
        yield data, time.process_time() - began


async def _read(world: World, objects: dict[str, bytes], found: Measured) -> Measured:
    store = Simulated(world)
    for key, data in {**objects, keys.RUN: encode(RunRecord(run="scale"))}.items():
        await store.put(key, data)
    run = await Run.open(store)
    began, before, read = time.process_time(), store.requests, store.bytes_read
    await list_run(run)
    listing = Cost(time.process_time() - began, store.requests - before, store.bytes_read - read)
    began, before, read = time.process_time(), store.requests, store.bytes_read
    ranks = max(world.ranks * 3 // 4, 1)
    rows = -(-world.ranks // ranks)
    first = min((ranks // 2) * rows, world.ranks - rows)
    async with await CheckpointReader.open(run, VERSION) as reader:
        await reader.common()
        shape = (world.ranks, ROW_BYTES)
        wanted = region(shape, Box((first, 0), (rows, ROW_BYTES)))
        for i in range(world.tensors):
            pieces = await reader.locate(f"model/layers.{i}.weight", wanted)
            assert len(pieces) == rows
    restore = Cost(time.process_time() - began, store.requests - before, store.bytes_read - read)
    return replace(found, listing=listing, restore=restore)


def table(found: Sequence[Measured]) -> str:
    """As Markdown, with the growth from line to line."""
    heads = ["ranks", "commit CPU s", "µs/piece", "peak MiB", "receipts MB", "written kB", "manifest kB", "list CPU ms"]
    heads += ["list kB", "restore CPU ms", "requests", "read kB", "growth: commit, peak, written, restore"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    before: Measured | None = None
    for one in found:
        cells = [
            f"{one.ranks:,}",
            f"{one.commit.seconds:.2f}",
            f"{one.commit.seconds / one.ranks / one.tensors * 1e6:.2f}",
            f"{one.peak_mib:.0f}",
            f"{one.commit.bytes / 1e6:.0f}",
            f"{one.written_bytes / 1e3:.0f}",
            f"{one.manifest_bytes / 1e3:.0f}",
            f"{one.listing.seconds * 1e3:.0f}",
            f"{one.listing.bytes / 1e3:.0f}",
            f"{one.restore.seconds * 1e3:.0f}",
            f"{one.restore.requests}",
            f"{one.restore.bytes / 1e3:.0f}",
            "" if before is None else _growth(before, one),
        ]
        lines.append("| " + " | ".join(cells) + " |")
        before = one
    return "\n".join(lines)


def _growth(before: Measured, one: Measured) -> str:
    pairs = [
        (before.commit.seconds, one.commit.seconds),
        (before.peak_mib, one.peak_mib),
        (before.written_bytes, one.written_bytes),
        (before.restore.seconds, one.restore.seconds),
    ]
    return ", ".join(f"{now / then:.2f}" for then, now in pairs)


def main(arguments: Sequence[str]) -> None:
    """``[TENSORS [RANKS…]]``, or ``--one TENSORS RANKS`` for one world in this process."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(asdict(measure(World(ranks=int(arguments[2]), tensors=int(arguments[1]))))))
        return
    tensors = int(arguments[0]) if arguments else 1000
    worlds = [int(text) for text in arguments[1:]] or [2**k for k in range(6, 15)]
    found: list[Measured] = []
    for ranks in worlds:
        command = [sys.executable, "-m", "bench.scale", "--one", str(tensors), str(ranks)]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        found.append(msgspec.json.decode(text, type=Measured))
        print(table(found[-1:]).splitlines()[-1], flush=True)
        RESULTS.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print("\n" + table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
