"""Tries again what may succeed later, and settles what a lost answer leaves open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import cast

from ckptd.errors import AlreadyExists, NotFound, ShortRead, StorageError, Unavailable
from ckptd.limits import MIB
from ckptd.storage import Backend, ObjectInfo, Source, settle
from ckptd_backends.retry import RetryPolicy, is_retryable, retried
from ckptd_backends.sources import parts_of, source_of
from ckptd_backends.wrappers.base import Wrapper

COMPARE_BYTES = 8 * MIB


class Retrying(Wrapper):
    """Retries whatever is ``retryable``, within the policy's attempts and deadline.

    An answer that got lost makes a conditional put collide with itself. So where a put that *had been tried before*
    finds an object there, or no attempt was answered, the object is read back: equal bytes are success, different
    bytes are the conflict, and where it cannot be read the error stands. Nothing is guessed.
    """

    def __init__(self, inner: Backend, policy: RetryPolicy | None = None) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        source = source_of(data)

        async def attempt(number: int) -> ObjectInfo:
            try:
                return await self.inner.put(key, data, if_absent=if_absent)
            except AlreadyExists as conflict:
                if number == 1:
                    raise
                return await self._read_back(key, source, conflict)

        try:
            return await retried(self.policy, f"put {key}", attempt)
        except Unavailable as unanswered:
            if not if_absent:
                raise
            return await self._read_back(key, source, unanswered)

    async def _read_back(self, key: str, source: Source, error: StorageError) -> ObjectInfo:
        """What the store says of the object, if it holds the source's bytes; else ``error`` is raised."""
        if not await self._holds(key, source.view):
            raise error
        await self.settle(key)  # what was tried may have failed between showing it and making it durable
        return replace(await self.inner.head(key), path_taken="read back")

    async def _holds(self, key: str, view: memoryview) -> bool:
        try:
            if (await self.inner.head(key)).size_bytes != view.nbytes:
                return False
            buffer = memoryview(bytearray(min(COMPARE_BYTES, view.nbytes)))
            for start, stop in parts_of(view.nbytes, COMPARE_BYTES):
                await self.inner.read_into(key, buffer[: stop - start], offset=start)
                if buffer[: stop - start] != view[start:stop]:
                    return False
        except (NotFound, ShortRead):
            return False
        return True

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        return await retried(self.policy, f"get {key}", lambda _: self.inner.get(key, limit_bytes=limit_bytes))

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        await retried(self.policy, f"read {key}", lambda _: self.inner.read_into(key, out, offset=offset))

    async def head(self, key: str) -> ObjectInfo:
        return await retried(self.policy, f"head {key}", lambda _: self.inner.head(key))

    async def settle(self, key: str) -> None:
        await retried(self.policy, f"settle {key}", lambda _: settle(self.inner, key))

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """A scan that breaks off begins again, and goes on after the last key that was handed out."""
        last = ""
        listing = self.inner.scan(prefix)

        async def following(number: int) -> ObjectInfo | None:
            nonlocal listing
            if number > 1:
                listing = self.inner.scan(prefix)
            async for info in listing:
                if info.key > last:
                    return info
            return None

        while info := await retried(self.policy, f"scan {prefix}", following):
            last = info.key
            yield info

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        await retried(self.policy, "delete", lambda _: self.inner.delete(wanted), retry_on=_only_retryable)


def _only_retryable(error: BaseException) -> bool:
    """A group is worth another attempt only if all of it is: a missing object is a success the second time."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(is_retryable)[1] is None
    return is_retryable(error)


_: type[Backend] = Retrying
