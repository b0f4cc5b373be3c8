"""Storage behind a fault proxy, for the cases that need one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ckptd.storage import Backend
from devtools.seaweedfs import S3Endpoint
from tests.client.conftest import daemon, open_ckpt, own_daemon
from tests.ranks.conftest import ranks, workers
from tests.servers.fault_proxy import FaultProxy
from tests.servers.proxied import opened

__all__ = ["daemon", "open_ckpt", "own_daemon", "ranks", "workers"]


@pytest.fixture
def proxy(s3_server: S3Endpoint) -> Iterator[FaultProxy]:
    """In front of the suite's S3 server."""
    with FaultProxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: FaultProxy, tmp_path: Path) -> AsyncIterator[Backend]:
    """A backend behind the proxy, warm, so that a test sees only its own requests."""
    async with opened(proxy, tmp_path) as backend:
        await backend.put("warm", b"up")
        proxy.forget()
        yield backend
