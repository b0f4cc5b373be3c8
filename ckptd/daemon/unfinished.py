"""Checkpoints that only lack their manifest: all receipts are stored, and then everybody died."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from ckptd.daemon.receipts import SKIPPED_BYTES_MAX, skip_reason
from ckptd.daemon.tier import Exchange
from ckptd.errors import FormatError
from ckptd.format.keys import CHECKPOINTS, MANIFESTS, Version, parse_version, receipt_key
from ckptd.storage import Backend

_RECEIPT = re.compile(rf"{CHECKPOINTS}([^/]+)/rank-([0-9]{{5}})-of-([0-9]{{5}})\.json")


async def without_manifest(backend: Backend, exchange: Exchange | None = None) -> list[tuple[Version, int, list[int]]]:
    """Version, world, and ranks whose receipts are here, of each checkpoint that has all receipts and no manifest, as
    far as listings show. ``exchange``: where the receipts of other nodes are."""
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    here: dict[str, set[int]] = defaultdict(set)
    async for info in backend.scan(CHECKPOINTS):
        if match := _RECEIPT.fullmatch(info.key):
            ranks[match[1], int(match[3])].add(int(match[2]))
            here[match[1]].add(int(match[2]))
    if exchange is not None and ranks:
        prefix = exchange.key(CHECKPOINTS)
        async for info in exchange.backend.scan(prefix):
            if match := _RECEIPT.fullmatch(CHECKPOINTS + info.key.removeprefix(prefix)):
                ranks[match[1], int(match[3])].add(int(match[2]))
    complete = {name for name, found in ranks.items() if found == set(range(name[1]))}
    if not complete:
        return []
    # Listed last: what is committed meanwhile is not taken for unfinished.
    committed = {info.key.removeprefix(MANIFESTS).removesuffix(".json") async for info in backend.scan(MANIFESTS)}
    found: list[tuple[Version, int, list[int]]] = []
    for name, world in sorted(complete):
        try:
            version = parse_version(name)
        except FormatError:
            continue  # a foreign name
        if name not in committed and here[name]:
            found.append((version, world, sorted(here[name])))
    return found


async def with_receipts(backend: Backend, version: Version, world: int, ranks: Sequence[int]) -> list[int]:
    """Those of the ranks that have a receipt here: not the word that they take no part."""
    found: list[int] = []
    for rank in ranks:
        key = receipt_key(version, rank, world)
        if (await backend.head(key)).size_bytes > SKIPPED_BYTES_MAX or skip_reason(
            await backend.get(key, limit_bytes=SKIPPED_BYTES_MAX)
        ) is None:
            found.append(rank)
    return found
