"""What tests of storage behind a fault proxy share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import boto3

from ckptd.limits import MIB
from ckptd.storage import Backend, Finding, SelfTesting, open_backend
from ckptd_backends.testing import patterned
from ckptd_backends.wrappers import RetryPolicy
from devtools.seaweedfs import S3Endpoint
from tests.servers.fault_proxy import FaultProxy

BIG = patterned(11 * MIB)
"""Three parts."""
QUICK = RetryPolicy(attempts_max=4, deadline_seconds=10, delay_seconds=0.02, delay_seconds_max=0.1)


@contextlib.asynccontextmanager
async def opened(
    proxy: FaultProxy, state_dir: Path | None = None, url: str = "", **options: Any
) -> AsyncIterator[Backend]:
    """A backend under a new root, or the given one, closed at the end."""
    backend = open_backend(url or proxy.server.prefix(), {**proxy.options, **options}, state_dir=state_dir)
    try:
        yield backend
    finally:
        await backend.aclose()


@contextlib.contextmanager
def raw_client(server: S3Endpoint) -> Iterator[Any]:
    """A client of the test's own, straight to the server."""
    client: Any = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name=server.region,
    )
    try:
        yield client
    finally:
        client.close()


def open_uploads(server: S3Endpoint, url: str) -> list[str]:
    """The names below a root of uploads that were neither completed nor aborted."""
    prefix = url.removeprefix(f"s3://{server.bucket}/")
    with raw_client(server) as client:
        uploads = client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])
    return [upload["Key"] for upload in uploads if upload["Key"].startswith(prefix)]


async def content(backend: Backend, key: str, size: int) -> bytes:
    """The first ``size`` bytes of an object."""
    out = bytearray(size)
    await backend.read_into(key, memoryview(out))
    return bytes(out)


async def findings(backend: Backend) -> dict[str, Finding]:
    """What a backend's self-test finds, by subject."""
    assert isinstance(backend, SelfTesting)
    return {finding.subject: finding for finding in await backend.self_test()}
