"""Records that a reader keeps in memory: each is loaded once, and the least recently used go when there are too
many."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K")
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Values by key, within a budget of bytes beyond the newest one. Whoever asks for a value that is being loaded
    waits for it; a load that fails is tried anew by the next."""

    def __init__(self, budget_bytes: int, loads_max: int) -> None:
        """``loads_max``: how many are loaded at once."""
        self._budget_bytes = budget_bytes
        self._gate = asyncio.Semaphore(loads_max)
        self._loading: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size_bytes = 0

    def peek(self, key: K) -> V | None:
        """The value, where it is there."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    async def get(self, key: K, load: Callable[[], Awaitable[tuple[V, int]]]) -> V:
        """The value. ``load`` gives it with its size in bytes."""
        found = self.peek(key)
        if found is not None:
            return found
        lock = self._loading.get(key)
        if lock is None:
            lock = self._loading[key] = asyncio.Lock()
        async with lock:
            found = self.peek(key)
            if found is not None:
                return found
            async with self._gate:
                value, size_bytes = await load()
            self._values[key] = value, size_bytes
            self._size_bytes += size_bytes
            while self._size_bytes > self._budget_bytes and len(self._values) > 1:
                self._size_bytes -= self._values.popitem(last=False)[1][1]
            return value
