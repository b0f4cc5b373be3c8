"""A store under a process that is killed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptd.storage import ObjectInfo
from ckptd_backends.wrappers.base import Wrapper


class Killed(BaseException):
    """Not an error that anybody would handle."""


class Mortal(Wrapper):
    """Its process is killed at the n-th put or delete, before or after that took effect; nothing happens afterwards."""

    def __init__(self, inner: Any, at: int, *, after: bool) -> None:
        super().__init__(inner)
        self._left = at
        self._after = after

    def _count(self) -> bool:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._after):
            raise Killed
        return self._left == 0

    async def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
        last = self._count()
        info = await super().put(key, data, if_absent=if_absent)
        if last:
            raise Killed
        return info

    async def delete(self, keys: Iterable[str]) -> None:
        last = self._count()
        wanted = list(keys)
        await super().delete(wanted[: len(wanted) // 2] if last else wanted)  # a call of many can be cut short
        if last:
            raise Killed
