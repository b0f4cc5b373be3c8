"""What is being copied to a tier, where the daemons of all nodes see it: an object whose name says everything."""

from __future__ import annotations

import contextlib

from ckptd.errors import FormatError
from ckptd.format.keys import Version, copy_key, copy_prefix, parse_version
from ckptd.storage import Backend


async def announce(home: Backend, tier: int, version: Version | None) -> None:
    """By rank 0's daemon: this is to be copied, and nothing else; ``None``: nothing is. Raises :class:`StorageError`,
    and groups of it."""
    before = [info.key async for info in home.scan(copy_prefix(tier))]
    key = None if version is None else copy_key(tier, version)
    if key is not None and key not in before:
        await home.put(key, b"{}")
    if outdated := [old for old in before if old != key]:
        await home.delete(outdated)


async def announced(home: Backend, tier: int) -> Version | None:
    """What rank 0's daemon has chosen last. Raises :class:`StorageError`."""
    prefix = copy_prefix(tier)
    found: list[Version] = []
    async for info in home.scan(prefix):
        with contextlib.suppress(FormatError):  # a foreign name
            found.append(parse_version(info.key.removeprefix(prefix).removesuffix(".json")))
    return max(found, key=lambda version: (version.generation, version.step), default=None)
