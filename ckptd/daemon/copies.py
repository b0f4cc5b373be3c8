"""The shards of one checkpoint that one daemon brings to a further tier, and what they refer to there meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.checkpoint.reader import CheckpointReader
from ckptd.daemon.bases import Bases, Referred, refer
from ckptd.daemon.copying import ShardCopy
from ckptd.format.records import Snapshot
from ckptd.storage import Backend


class Copies:
    """Of one checkpoint. To be released once it is committed there, or given up."""

    def __init__(
        self,
        reader: CheckpointReader,
        target: Backend,
        bases: Bases | None,
        on_expected: Callable[[int], None],
        on_bytes: Callable[[int], None],
    ) -> None:
        """``bases``: what copies there are compared with; ``None``: all of each is stored. Called with sizes:
        ``on_expected`` once for each shard, ``on_bytes`` as it is stored."""
        self._reader = reader
        self._target = target
        self._bases = bases
        self._on_expected = on_expected
        self._on_bytes = on_bytes
        self._referred: list[Referred] = []
        self._brought: list[tuple[Snapshot, bytes]] = []

    async def bring(self, rank: int) -> bytes:
        """The rank's receipt, as it is durable in the further tier on return. What an earlier attempt has brought there
        is not sent again. Raises as :class:`ShardCopy`."""
        copy = await ShardCopy.of(self._reader, rank, self._target)
        receipt = await copy.found()
        if receipt is None:
            referred = await self._refer(copy)
            self._on_expected(copy.stored_bytes(referred.references))
            receipt = await copy.bring(referred.references, self._on_bytes)
        else:
            size = copy.receipt.shard.bytes
            self._on_expected(size)
            self._on_bytes(size)
        self._brought.append((copy.snapshot, receipt))
        return receipt

    async def _refer(self, copy: ShardCopy) -> Referred:
        base = None if self._bases is None else await self._bases.find(self._target, copy.snapshot)
        if base is None:
            return Referred()
        referred = await refer(self._target, base, copy.state)
        self._referred.append(referred)
        return referred

    def committed(self) -> None:
        """They are committed there: what follows is compared with them."""
        if self._bases is not None:
            for snapshot, receipt in self._brought:
                self._bases.committed(self._target.url, snapshot, receipt, likely=True)

    async def release(self) -> None:
        """Let go of what is referred to. Idempotent."""
        referred, self._referred = self._referred, []
        for one in referred:
            await one.release()
