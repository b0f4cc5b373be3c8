"""What follows from the layout of a world of one rank, kept: it is the same from save to save, and takes longer to
decode, check and index than all else that is proved of a small shard.

Pure: the same bytes give the same. They are told by their digest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ckptd.format.digests import digest
from ckptd.format.index import SplitIndex
from ckptd.limits import MIB

DERIVED_KEPT_BYTES = 16 * MIB
"""Of layouts, as they lie in snapshots: what is kept of one takes less."""


@dataclass(frozen=True, slots=True)
class Derived:
    """Of a layout that was found sound, and to cover every tensor exactly once."""

    aliases: Mapping[str, str]
    shard_bytes: int
    header_bytes: int
    piece_blocks: int
    """How many digest blocks the pieces have."""
    index: SplitIndex


class DerivedKept:
    """Of the layouts that came last. Safe from several threads."""

    def __init__(self, budget_bytes: int = DERIVED_KEPT_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._known: OrderedDict[tuple[bytes, int], tuple[Derived, int]] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, layout: msgspec.Raw, block_bytes: int) -> Derived | None:
        """``block_bytes``: how long a digest block is at most."""
        key = _key(layout, block_bytes)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        return None if found is None else found[0]

    def keep(self, layout: msgspec.Raw, block_bytes: int, derived: Derived) -> None:
        """Nothing where it is too large."""
        key, size_bytes = _key(layout, block_bytes), len(memoryview(layout))
        with self._lock:
            if key in self._known or size_bytes > self._budget_bytes:
                return
            self._known[key] = derived, size_bytes
            self._size_bytes += size_bytes
            while self._size_bytes > self._budget_bytes:
                self._size_bytes -= self._known.popitem(last=False)[1][1]


def _key(layout: msgspec.Raw, block_bytes: int) -> tuple[bytes, int]:
    return digest(memoryview(layout)), block_bytes
