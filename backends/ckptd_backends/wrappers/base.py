"""What all wrappers share: they pass everything on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from ckptd.storage import Backend, Capabilities, Finding, LeavingUploads, ObjectInfo, SelfTesting, Source, settle


class Wrapper:
    """A backend that hands every call to ``inner``; subclasses override what they are for.

    The optional protocols are passed on too: where ``inner`` has none, there is nothing to find and nothing to abort.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        return await self.inner.put(key, data, if_absent=if_absent)

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        return await self.inner.get(key, limit_bytes=limit_bytes)

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        await self.inner.read_into(key, out, offset=offset)

    async def head(self, key: str) -> ObjectInfo:
        return await self.inner.head(key)

    def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self.inner.scan(prefix)

    async def delete(self, keys: Iterable[str]) -> None:
        await self.inner.delete(keys)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def self_test(self) -> list[Finding]:
        return await self.inner.self_test() if isinstance(self.inner, SelfTesting) else []

    async def abort_stale_uploads(self) -> int:
        return await self.inner.abort_stale_uploads() if isinstance(self.inner, LeavingUploads) else 0

    async def settle(self, key: str) -> None:
        await settle(self.inner, key)


_: type[Backend] = Wrapper
