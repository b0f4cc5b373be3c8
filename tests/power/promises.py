"""What was promised so far, and whether a disk holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from ckptd.errors import AlreadyExists
from ckptd.format.cover import check_layout
from ckptd.format.digests import digest_blocks, hex_digest
from ckptd.format.keys import MANIFESTS, Version, manifest_key, receipt_key
from ckptd.format.records import Manifest, Receipt, Snapshot, decode, decode_layout
from ckptd.format.shard import block_bounds
from ckptd.storage import Backend, ObjectInfo, Source
from ckptd_backends.sources import Part, source_of, stored
from ckptd_backends.wrappers.base import Wrapper


class Broken(AssertionError):
    """A promise was broken."""


class Promises:
    """What a disk may look like when the power goes now: for each key the values that may be found (``None``: nothing),
    and what ckptd has told a trainer."""

    def __init__(self, holds: Callable[[int], bool] = lambda rank: True) -> None:
        """``holds``: whether the shard of a rank is to be there."""
        self._holds = holds
        self.allowed: dict[str, set[bytes | None]] = {}
        self.durable: set[tuple[Version, int, int]] = set()
        """Version, rank and world: the trainer was told that its snapshot may be forgotten."""
        self.committed: set[Version] = set()
        self.going: set[Version] = set()
        """Whose deletion has begun."""

    def check(self, found: Mapping[str, bytes]) -> None:
        """``found``: key → bytes. Raises :class:`Broken`."""
        for key, values in self.allowed.items():
            value = found.get(key)
            if value not in values:
                raise Broken(f"{key}: {_said(value)}, where one of {sorted(map(_said, values))} was to be")
        if strange := [key for key in found if key not in self.allowed and "~" not in key]:
            raise Broken(f"nobody has put {strange[0]}")
        for version, rank, world in self.durable:
            if version not in self.going:
                _check_rank(found, receipt_key(version, rank, world), f"{version} was durable", shard_too=True)
        for version in self.committed - self.going:
            if manifest_key(version) not in found:
                raise Broken(f"{version} was committed, and its manifest is gone")
        for key in found:
            if key.startswith(MANIFESTS) and "~" not in key:
                _check_checkpoint(found, key, self._holds)

    def after_power_loss(self, found: Mapping[str, bytes]) -> None:
        """What was found is what there is. Trainers have forgotten what they were told."""
        self.allowed = {key: {found.get(key)} for key in self.allowed}


class Watched:
    """A source of which it is known what was read of it, once that may become visible."""

    def __init__(self, inner: Source, may_be_seen: Callable[[bytes], None]) -> None:
        self._inner = inner
        self._may_be_seen = may_be_seen
        self._read = bytearray(inner.view.nbytes)
        self.value = b""

    @property
    def view(self) -> memoryview:
        return self._inner.view

    async def ready(self, start: int, stop: int) -> None:
        await self._inner.ready(start, stop)
        self._read[start:stop] = self._inner.view[start:stop]

    def stored(self, start: int, stop: int) -> None:
        stored(self._inner, Part(start, stop))

    async def complete(self) -> None:
        await self._inner.complete()
        self.value = bytes(self._read)
        self._may_be_seen(self.value)


class Recorded(Wrapper):
    """A backend of which every word is taken down."""

    def __init__(self, inner: Backend, promises: Promises) -> None:
        super().__init__(inner)
        self._allowed = promises.allowed

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        values = self._allowed.setdefault(key, {None})
        news: set[bytes | None] = set()

        def may_be_seen(value: bytes) -> None:
            news.update({value} - values)
            values.add(value)

        source = Watched(source_of(data), may_be_seen)
        try:
            info = await self.inner.put(key, source, if_absent=if_absent)
        except AlreadyExists:
            values -= {None, *news}  # whoever is told so may rely on what is there
            raise
        values.intersection_update({source.value})
        return info

    async def delete(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        for key in gone:
            self._allowed.setdefault(key, {None}).add(None)
        await self.inner.delete(gone)
        for key in gone:
            self._allowed[key].intersection_update({None})


def _said(value: bytes | None) -> str:
    return "nothing" if value is None else f"{len(value)} bytes {hex_digest(value)[:8]}"


def _check_checkpoint(found: Mapping[str, bytes], key: str, holds: Callable[[int], bool]) -> None:
    where = f"{key} is there"
    manifest = _manifest(found[key])
    if manifest_key(manifest.version) != key:
        raise Broken(f"{where}, and is the manifest of {manifest.version}")
    assert len(manifest.receipts) == manifest.world, "the model is of small worlds"
    common = (manifest.common,) if manifest.common is not None else ()
    for named in (*manifest.receipts, *manifest.index_parts, *common):
        if named.key not in found:
            raise Broken(f"{where}, and {named.key} is not")
        if (len(found[named.key]), _digest_of(found[named.key])) != (named.bytes, named.digest):
            raise Broken(f"{where}, and {named.key} has other bytes than it promises")
    for receipt in manifest.receipts:
        _check_rank(found, receipt.key, where, shard_too=holds(receipt.rank))


@lru_cache(4096)
def _manifest(data: bytes) -> Manifest:
    return decode(data, Manifest)


def _check_rank(found: Mapping[str, bytes], key: str, where: str, *, shard_too: bool) -> None:
    if key not in found:
        raise Broken(f"{where}, and {key} is not")
    if not shard_too:
        return
    shard, size, blocks, bounds = _promised_by(found[key])
    if shard not in found:
        raise Broken(f"{where}, and {shard} is not")
    if len(found[shard]) != size or _blocks_of(found[shard], bounds) != blocks:
        raise Broken(f"{where}, and {shard} has other bytes than its receipt promises")


@lru_cache(4096)
def _promised_by(data: bytes) -> tuple[str, int, bytes, tuple[tuple[int, int], ...]]:
    """Of a receipt: key, size, digests and bounds of the shard's blocks."""
    proof = decode(data, Receipt)
    layout = decode_layout(decode(proof.snapshot, Snapshot).layout)
    sizes = [piece.bytes for piece in check_layout(layout)]
    bounds = tuple(block_bounds(layout.header_bytes, sizes, proof.shard.block_bytes))
    return proof.shard.key, proof.shard.bytes, proof.shard.blocks, bounds


@lru_cache(4096)
def _blocks_of(shard: bytes, bounds: tuple[tuple[int, int], ...]) -> bytes:
    return digest_blocks(memoryview(shard), bounds)


@lru_cache(4096)
def _digest_of(data: bytes) -> str:
    return hex_digest(data)
