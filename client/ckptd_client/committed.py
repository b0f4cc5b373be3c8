"""A committed checkpoint, read from the nearest place that has it: this node's memory, then storage."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ckptd.checkpoint.concurrency import each, in_thread
from ckptd.checkpoint.plan import Want, make_plan, stage
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import holds_exactly, piece_of_rank
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import check_proof
from ckptd.errors import IntegrityError
from ckptd.format.keys import Version
from ckptd.format.records import IndexPiece, TensorEntry
from ckptd.storage import Backend, Limits, open_backend, with_standard_wrappers
from ckptd_client.blocking import BlockingLoop
from ckptd_client.capture.stored import Amount, Described, InCommon, Ranks, Wanted
from ckptd_client.gather import Scratch, gather
from ckptd_client.roots import Root

LOCATED_AT_ONCE = 64
"""Tensors whose pieces are looked up at the same time."""

_log = logging.getLogger(__name__)


class CommittedCheckpoint:
    """A :class:`ckptd_client.capture.stored.Stored` that verifies each byte against its receipt, wherever it lies.

    Holds a reader's lease; to be closed, best by ``with``.
    """

    def __init__(
        self,
        root: Root,
        version: Version,
        *,
        rank: int,
        world: int,
        memory: Mapping[int, memoryview] | None = None,
        scratch: Scratch = lambda _: None,
        each_ranks: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """``memory``: shards of this checkpoint that lie in this node's memory, by rank. ``each_ranks``: for the
        objects that take over the states of another number of ranks, what each rank saved. Rank 0 proves the manifest.
        Raises what :class:`CheckpointReader` raises."""
        self._memory = dict(memory or {})
        self._scratch = scratch
        self._each_ranks = each_ranks or {}
        self._seen: dict[str, TensorEntry] = {}
        self._world: dict[str, Described] = {}
        self.amount = Amount()
        self._loop = BlockingLoop()
        self._backend: Backend = with_standard_wrappers(open_backend(root.url, root.options), Limits())
        self._reader: CheckpointReader | None = None
        try:
            self._loop.run(self._open(root, version, rank, world))
        except BaseException:
            self.close()
            raise

    async def _open(self, root: Root, version: Version, rank: int, world: int) -> None:
        reader = await CheckpointReader.open(await Run.open(self._backend), version, holder=root.holder)
        self._reader = reader
        if rank == 0:
            await check_proof(reader)
        manifest = reader.manifest
        self.ranks = Ranks(rank, world, manifest.world, f"{manifest.run}/{version}")
        if self.ranks.same:
            _, snapshot, layout = await reader.receipt(rank)
            self.tree = bytes(snapshot.tree)
            self.aliases: Mapping[str, str] = layout.aliases
            self._seen = {entry.name: entry for entry in layout.tensors}
        else:
            common = await reader.common()
            self.tree, self.aliases = bytes(common.tree), common.aliases
        async for entry in reader.entries():
            self._world[entry.name] = Described(entry.name, entry.dtype, entry.shape)

    # What there is

    def describe(self, name: str) -> Described | None:
        """See :class:`ckptd_client.capture.stored.Stored`."""
        seen = self._seen.get(name)
        if seen is not None and seen.per_rank:
            return Described(name, seen.dtype, seen.shape)
        return self._world.get(name)

    def in_common(self) -> InCommon:
        """See :class:`ckptd_client.capture.stored.Stored`."""
        common = self._loop.run(self._opened().common())
        return InCommon(bytes(common.tree), common.aliases)

    def of_each_rank(self, part: str) -> Sequence[Any] | None:
        """See :class:`ckptd_client.capture.stored.Stored`."""
        return self._each_ranks.get(part)

    # Bytes

    def fetch(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """See :class:`ckptd_client.capture.stored.Stored`."""
        return self._loop.run(self._fetch(wanted))

    async def _fetch(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        reader = self._opened()
        found = [self._in_own_shard(one) for one in wanted]
        elsewhere = [i for i, want in enumerate(found) if want is None]
        located = await each([wanted[i] for i in elsewhere], LOCATED_AT_ONCE, self._locate)
        for i, want in zip(elsewhere, located, strict=True):
            found[i] = want
        wants = [want for want in found if want is not None]
        ranks = {piece.rank for want in wants for piece in want.pieces}
        block_bytes = {rank: await reader.block_bytes(rank) for rank in sorted(ranks)}
        memory = {rank: view for rank, view in self._memory.items() if rank in ranks}
        if memory:
            memory = await self._verified(memory, wants, block_bytes)
        found_tensors, self.amount = await gather(wants, memory, reader, block_bytes, self._scratch)
        return found_tensors

    def _in_own_shard(self, wanted: Wanted) -> Want | None:
        """What this rank itself saved of it, where that is just what it wants now: as when nothing has changed."""
        seen = self._seen.get(wanted.tensor.name)
        if seen is None:
            return None
        rank = self.ranks.rank
        if seen.per_rank:
            return _want(wanted, [piece_of_rank(piece, rank) for piece in seen.pieces])
        for piece in seen.pieces:
            if holds_exactly(piece, wanted.region, seen.shape):
                return _want(wanted, (piece_of_rank(piece, rank),))
        return None

    async def _locate(self, wanted: Wanted) -> Want:
        return _want(wanted, await self._opened().locate(wanted.tensor.name, wanted.region))

    async def _verified(
        self, memory: Mapping[int, memoryview], wants: Sequence[Want], block_bytes: Mapping[int, int]
    ) -> dict[int, memoryview]:
        """The shards in memory of which all that is wanted equals its digests. The others are read from storage."""
        reader = self._opened()
        placed, _ = stage([want for want in wants if all(piece.rank in memory for piece in want.pieces)])
        sound = dict(memory)
        for shard in make_plan(placed, block_bytes).shards:
            known = await reader.shard(shard.rank)
            view = memory[shard.rank]
            for read in shard.reads:
                for window in known.windows(read.start, read.stop):
                    data = view[known.starts[window[0]] : known.starts[window[1]]]
                    if await in_thread(known.first_bad_block, window, data) is not None:
                        _log.warning("rank %d's snapshot in memory has changed: it is not used", shard.rank)
                        sound.pop(shard.rank, None)
        return sound

    # The end

    def _opened(self) -> CheckpointReader:
        if self._reader is None:
            raise IntegrityError("the checkpoint was closed")
        return self._reader

    def close(self) -> None:
        """Give the lease back. What was fetched stays. Idempotent."""
        reader, self._reader = self._reader, None

        async def close() -> None:
            if reader is not None:
                await reader.aclose()
            await self._backend.aclose()

        self._loop.run(close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _want(wanted: Wanted, pieces: Sequence[IndexPiece]) -> Want:
    tensor = wanted.tensor
    return Want(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, region=wanted.region, pieces=tuple(pieces))
