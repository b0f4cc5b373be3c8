"""The reference implementation passes the suite."""

from __future__ import annotations

import time

from ckptd.storage import Backend, open_backend
from ckptd_backends import memory
from ckptd_backends.testing import BackendTests, unique_name


class TestMemory(BackendTests):
    copies_data = True

    def make(self) -> Backend:
        return open_backend(f"memory://{unique_name()}")

    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        memory.stores[backend.url][key] = (data, time.time())

    def raw_names(self, backend: Backend) -> set[str]:
        return set(memory.stores[backend.url])

    async def test_a_name_is_one_store(self, backend: Backend) -> None:
        await backend.put("x", b"shared")
        assert await open_backend(backend.url).get("x", limit_bytes=6) == b"shared"
