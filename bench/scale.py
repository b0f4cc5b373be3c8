"""``python -m bench.scale``: what a commit, a listing and one rank's restore cost as the world grows.

Receipts are simulated, made as they are asked for: every tensor cut by rows over all ranks, as FSDP does, some values
of each rank's own, a state tree that differs in one leaf. Each world runs in a process of its own, so that its memory
is its own. No shard is read: what is measured are the records. The commit is that of rank 0's daemon, with the process
that proves it, and so is the check of the manifest that rank 0 makes at a restore. Times are of the processor, as
nothing here waits, but for the longest pause of the daemon's loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ckptd.checkpoint.listing import list_run
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import check_proof
from ckptd.daemon.commit import Commit, Patience
from ckptd.daemon.tier import Checkpoint
from ckptd.format import keys
from ckptd.format.digests import DIGEST_BYTES, hex_digest
from ckptd.format.keys import Version
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
from ckptd.limits import BLOCK_BYTES_WRITTEN, MANIFEST_BYTES_MAX, PAGE_BYTES
from ckptd.storage import ObjectInfo
from ckptd_backends.memory import MemoryBackend
from ckptd_backends.wrappers.base import Wrapper

RESULTS = Path(__file__).parent / "results" / "scale.json"
VERSION = Version(1000, 1)
PATIENCE = Patience(commit_seconds=3600, takeover_seconds=0)
CHECKED_RANKS_MAX = 4096
"""The check at a restore is the commit's work once more: it is not measured in larger worlds."""
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
        self.making_seconds = 0.0
        """Of receipts, which no real store does."""

    async def head(self, key: str) -> ObjectInfo:
        self.requests += 1
        if key in self._ranks:
            return ObjectInfo(key, len(self._world.receipt(self._ranks[key])), 0.0)
        return await super().head(key)

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        rank = self._ranks.get(key)
        began = time.process_time()
        data = await super().get(key, limit_bytes=limit_bytes) if rank is None else self._world.receipt(rank)
        if rank is not None:
            self.making_seconds += time.process_time() - began
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
class Proved:
    """What a proof costs whoever lets it be made, the making of receipts aside."""

    cost: Cost
    """Of the process that reads the receipts and goes on with its work, and keeps its interpreter lock."""
    prover_seconds: float
    prover_peak_mib: float
    peak_mib: float
    """Of the process that reads. As Python and the imports have it: 30."""
    pause_milliseconds: float
    """The longest time in which its loop answered nobody; with others on the machine, their time too."""


@dataclass(frozen=True)
class Measured:
    """One world."""

    ranks: int
    tensors: int
    load: float
    """Of the machine, over the last minute, when it began."""
    receipt_bytes: int
    commit: Proved
    written_bytes: int
    """The manifest and what it names, receipts aside."""
    manifest_bytes: int
    check: Proved | None
    """Of the manifest, at a restore, by rank 0."""
    listing: Cost
    restore: Cost
    """One rank of three quarters as many, which wants its rows of every tensor: what it reads before any shard."""


async def measure(world: World) -> Measured:
    """In this process, whose memory is then taken."""
    load = os.getloadavg()[0]
    store = Simulated(world)
    await store.put(keys.RUN, encode(RunRecord(run="scale")))
    commit = Commit(Checkpoint(store, VERSION, world.ranks, "scale"), PATIENCE, lambda rank: None, resumed=False)
    commit.leads = True
    committed = await _proved(store, commit.run())
    run = await Run.open(store)
    async with await CheckpointReader.open(run, VERSION) as reader:
        checked = await _proved(store, check_proof(reader)) if world.ranks <= CHECKED_RANKS_MAX else None
    manifest = await store.get(keys.manifest_key(VERSION), limit_bytes=MANIFEST_BYTES_MAX)
    written = [info.size_bytes async for info in store.scan("") if info.key != keys.RUN]
    listing, restore = await _read(world, store)
    return Measured(
        ranks=world.ranks,
        tensors=world.tensors,
        load=load,
        receipt_bytes=committed.cost.bytes // committed.cost.requests,
        commit=committed,
        written_bytes=sum(written),
        manifest_bytes=len(manifest),
        check=checked,
        listing=listing,
        restore=restore,
    )


async def _proved(store: Simulated, work: Coroutine[Any, Any, object]) -> Proved:
    watch = _Watch()
    watching = asyncio.create_task(watch.run())
    requests, read, making = store.requests, store.bytes_read, store.making_seconds
    began, children = time.process_time(), _children_seconds()
    await work
    seconds = time.process_time() - began - (store.making_seconds - making)
    watching.cancel()
    return Proved(
        cost=Cost(seconds, store.requests - requests, store.bytes_read - read),
        prover_seconds=_children_seconds() - children,
        prover_peak_mib=watch.prover_peak_mib,
        peak_mib=_peak_mib(os.getpid()),
        pause_milliseconds=watch.pause_seconds * 1e3,
    )


class _Watch:
    """Wants to run a hundred times a second, and notes by how much it was late."""

    def __init__(self) -> None:
        self.pause_seconds = self.prover_peak_mib = 0.0

    async def run(self) -> None:
        turn = 0
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            self.pause_seconds = max(self.pause_seconds, time.monotonic() - began - 0.01)
            turn += 1
            if turn % 20 == 0:
                for child in psutil.Process().children():
                    self.prover_peak_mib = max(self.prover_peak_mib, _peak_mib(child.pid))


def _children_seconds() -> float:
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _peak_mib(process: int) -> float:
    """Of memory; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


async def _read(world: World, store: Simulated) -> tuple[Cost, Cost]:
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
    return listing, restore


def table(found: Sequence[Measured]) -> str:
    """As Markdown."""
    heads = ["ranks", "receipts MB", "commit: prover CPU s", "µs/piece", "prover MiB", "daemon CPU s", "daemon MiB"]
    heads += ["longest pause ms", "written kB", "manifest kB", "list CPU ms", "check at restore: prover CPU s"]
    heads += ["reader CPU s", "reader MiB", "restore CPU ms", "requests", "read kB", "load"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    for one in found:
        check = one.check
        cells = [
            f"{one.ranks:,}",
            f"{one.commit.cost.bytes / 1e6:.0f}",
            f"{one.commit.prover_seconds:.1f}",
            f"{one.commit.prover_seconds / one.ranks / one.tensors * 1e6:.1f}",
            f"{one.commit.prover_peak_mib:.0f}",
            f"{one.commit.cost.seconds:.1f}",
            f"{one.commit.peak_mib:.0f}",
            f"{one.commit.pause_milliseconds:.0f}",
            f"{one.written_bytes / 1e3:.0f}",
            f"{one.manifest_bytes / 1e3:.0f}",
            f"{one.listing.seconds * 1e3:.0f}",
            "" if check is None else f"{check.prover_seconds:.1f}",
            "" if check is None else f"{check.cost.seconds:.1f}",
            "" if check is None else f"{check.peak_mib:.0f}",
            f"{one.restore.seconds * 1e3:.0f}",
            f"{one.restore.requests}",
            f"{one.restore.bytes / 1e3:.0f}",
            f"{one.load:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """``[TENSORS [RANKS…]]``, or ``--one TENSORS RANKS`` for one world in this process."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(asdict(asyncio.run(measure(World(ranks=int(arguments[2]), tensors=int(arguments[1])))))))
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
