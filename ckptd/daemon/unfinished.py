"""Checkpoints that only lack their manifest: all receipts are stored, and then everybody died."""

from __future__ import annotations

import re
from collections import defaultdict

from ckptd.errors import FormatError
from ckptd.format.keys import CHECKPOINTS, MANIFESTS, Version, parse_version
from ckptd.storage import Backend

_RECEIPT = re.compile(rf"{CHECKPOINTS}([^/]+)/rank-([0-9]{{5}})-of-([0-9]{{5}})\.json")


async def without_manifest(backend: Backend) -> list[tuple[Version, int]]:
    """Version and world of each checkpoint that has all receipts and no manifest, as far as a listing shows."""
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    async for info in backend.scan(CHECKPOINTS):
        if match := _RECEIPT.fullmatch(info.key):
            ranks[match[1], int(match[3])].add(int(match[2]))
    complete = {name for name, found in ranks.items() if found == set(range(name[1]))}
    if not complete:
        return []
    # Listed last: what is committed meanwhile is not taken for unfinished.
    committed = {info.key.removeprefix(MANIFESTS).removesuffix(".json") async for info in backend.scan(MANIFESTS)}
    found: list[tuple[Version, int]] = []
    for name, world in sorted(complete):
        try:
            version = parse_version(name)
        except FormatError:
            continue  # a foreign name
        if name not in committed:
            found.append((version, world))
    return found
