"""One rank's shard from a nearer tier to a further one: verified on the way, never whole in memory.

Where both hold all of it, or refer to the same, it has the same name and bytes in both. Else the further tier gets what
is unchanged there as a reference to its own checkpoints, and the rest as a shard of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ckptd.checkpoint.concurrency import in_thread
from ckptd.checkpoint.objects import place
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.unchanged import Described, described
from ckptd.daemon.assembled import AssembledSource
from ckptd.daemon.receipts import put_debug_mark, put_first, skip_reason
from ckptd.errors import IntegrityError, NotFound, SaveError, SaveSkipped
from ckptd.format.digests import hex_digest
from ckptd.format.keys import receipt_key, shard_key
from ckptd.format.records import Receipt, Reference, ShardProof, Snapshot, decode, encode, receipt_of
from ckptd.format.remainder import Remainder, Run, remainder, runs_within
from ckptd.format.shard import header_digests
from ckptd.limits import RECEIPT_BYTES_MAX
from ckptd.storage import Backend

OnBytes = Callable[[int], None]
"""Called with the size of what has just been stored, or was there already."""


class ShardCopy:
    """One rank's shard, on its way."""

    def __init__(self, reader: CheckpointReader, rank: int, target: Backend, near: bytes) -> None:
        """``near``: the rank's receipt in the nearer tier."""
        self.reader = reader
        self.rank = rank
        self.target = target
        self.near = near
        self.receipt = decode(near, Receipt)
        self.snapshot = decode(self.receipt.snapshot, Snapshot)
        self.state: Described = described(self.receipt)

    @classmethod
    async def of(cls, reader: CheckpointReader, rank: int, target: Backend) -> ShardCopy:
        """Raises what the reader raises."""
        return await in_thread(cls, reader, rank, target, await reader.receipt_bytes(rank))

    @property
    def _key(self) -> str:
        return receipt_key(self.reader.version, self.rank, self.reader.manifest.world)

    async def found(self) -> bytes | None:
        """The receipt of the same state, where an earlier attempt has brought it there.

        Raises :class:`SaveSkipped` where the rank was given up there, :class:`SaveError` where another state is in its
        place.
        """
        try:
            return await self._accepted(await self.target.get(self._key, limit_bytes=RECEIPT_BYTES_MAX))
        except NotFound:
            return None

    async def bring(self, references: Sequence[Reference], on_bytes: OnBytes) -> bytes:
        """The rank's receipt, as it is durable there on return, with its shard. ``references``: to checkpoints there.

        Raises as :meth:`found`, :class:`IntegrityError` for damage in the nearer tier, and what the stores raise.
        """
        data, header = self.near, b""
        if tuple(references) == self.receipt.shard.references:
            runs = await self._own_runs()
        else:
            left = remainder(self.state.layout, references)
            data, header, runs = self._moved(left, tuple(references)), left.header, left.runs
        shard = decode(data, Receipt).shard
        if await _is_stored(self.target, shard.key, shard.bytes):
            on_bytes(shard.bytes)
        else:
            await self._put(shard, header, runs, on_bytes)
        if self.snapshot.debug:
            await put_debug_mark(self.target, self.reader.version)
        return await self._accepted(await put_first(self.target, self._key, data))

    def stored_bytes(self, references: Sequence[Reference]) -> int:
        """How much :meth:`bring` has to send."""
        if tuple(references) == self.receipt.shard.references:
            return self.receipt.shard.bytes
        return remainder(self.state.layout, references).size_bytes

    async def _own_runs(self) -> list[Run]:
        """The shard as it is in the nearer tier, with its header."""
        key, found = self.receipt.shard.key, (await self.reader.shard(self.rank)).stretches
        return [Run(part.at, part.start, part.stop - part.start) for part in found if part.key == key]

    def _moved(self, left: Remainder, references: tuple[Reference, ...]) -> bytes:
        """The receipt of the same state where other pieces are stored."""
        shard, version = self.receipt.shard, self.reader.version
        # One name for one choice: what an earlier attempt has stored is found again, and nothing else.
        attempt = hex_digest(b"\0".join([shard.attempt.encode(), *map(encode, references)]))
        blocks = header_digests(left.header, shard.block_bytes) + self.state.digests
        moved = msgspec.structs.replace(
            shard,
            attempt=attempt,
            blocks=blocks,
            bytes=left.size_bytes,
            checksum="",
            digest=hex_digest(blocks),
            key=shard_key(version, self.rank, self.reader.manifest.world, attempt),
            references=references,
        )
        return encode(receipt_of(moved, self.receipt.snapshot))

    async def _put(self, shard: ShardProof, header: bytes, runs: Sequence[Run], on_bytes: OnBytes) -> None:
        async def fill(start: int, stop: int, out: memoryview) -> None:
            out[: len(header[start:stop])] = header[start:stop]
            for run in runs_within(runs, start, stop):
                part = out[run.at - start : run.at - start + run.length]
                await self.reader.read(self.rank, run.start, run.start + run.length, part)

        source = AssembledSource(shard.bytes, fill, on_stored=on_bytes)
        try:
            stored = await self.target.put(shard.key, source)
        finally:
            source.close()
        if stored.size_bytes != shard.bytes:
            where = place(self.target, shard.key)
            raise IntegrityError(f"{where}: stored {stored.size_bytes} of {shard.bytes} bytes")

    async def _accepted(self, found: bytes) -> bytes:
        """What is there, where it is the same state."""
        if found == self.near:
            return found
        where = place(self.target, self._key)
        if (reason := skip_reason(found)) is not None:
            raise SaveSkipped(f"{where}: skipped: {reason}")
        if await in_thread(self._is_same, found):
            return found
        raise SaveError(f"{where} is the receipt of another attempt than that in {self.reader.run.backend.url}")

    def _is_same(self, found: bytes) -> bool:
        receipt = decode(found, Receipt)
        return bytes(receipt.snapshot) == bytes(self.receipt.snapshot) and described(receipt) == self.state


async def _is_stored(target: Backend, key: str, size_bytes: int) -> bool:
    """An attempt's name is put whole or not at all, and with no other bytes."""
    try:
        return (await target.head(key)).size_bytes == size_bytes
    except NotFound:
        return False
