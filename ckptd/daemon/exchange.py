"""Clearing up what the nodes have left each other of a tier of node-local disks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection

from ckptd.daemon.tier import Exchange
from ckptd.errors import FormatError
from ckptd.format.keys import CHECKPOINTS, Version, parse_version
from ckptd.limits import EXCHANGED_KEPT


async def clear_exchange(exchange: Exchange, committed: Collection[Version]) -> None:
    """Delete the exchanged receipts of checkpoints that are not committed, but for the newest :data:`EXCHANGED_KEPT`,
    which may still be on their way. Raises :class:`StorageError`, and groups of it."""
    prefix = exchange.key(CHECKPOINTS)
    keys: dict[Version, list[str]] = defaultdict(list)
    async for info in exchange.backend.scan(prefix):
        with contextlib.suppress(FormatError):  # a foreign name
            keys[parse_version(info.key.removeprefix(prefix).partition("/")[0])].append(info.key)
    uncommitted = sorted(keys.keys() - set(committed), key=lambda version: (version.generation, version.step))
    for version in uncommitted[:-EXCHANGED_KEPT]:
        await exchange.backend.delete(keys[version])
