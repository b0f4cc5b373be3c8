"""A real S3 server."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import boto3
import msgspec
import pytest
from botocore.config import Config

from ckptd.errors import ConfigError, UsageError
from ckptd.storage import Backend, Finding, SelfTesting, open_backend
from ckptd_backends.options import checked_options
from ckptd_backends.s3 import CONDITIONAL_PUT_BYTES_MAX
from ckptd_backends.s3_body import checksum_of
from ckptd_backends.s3_options import S3Options
from ckptd_backends.testing import BackendTests, patterned
from devtools.seaweedfs import S3Endpoint

PART_BYTES = 5 << 20


def raw_client(server: S3Endpoint) -> Any:
    """A client of the test's own, which shares nothing with the backend."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name=server.region,
        config=Config(s3={"addressing_style": "path"}, proxies={}),
    )


def names_below(client: Any, url: str) -> set[str]:
    """Objects and open uploads below a root."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/").get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    found = {entry["Key"] for entry in listed} | {
        f"{entry['Key']} (upload)" for entry in uploads if entry["Key"].startswith(f"{prefix}/")
    }
    return {name.removeprefix(f"{prefix}/") for name in found}


class TestS3(BackendTests):
    examples_max = 6

    @pytest.fixture(autouse=True)
    def _place(self, s3_server: S3Endpoint) -> Iterator[None]:
        self.server = s3_server
        self.client = raw_client(s3_server)
        yield
        self.client.close()

    def make(self) -> Backend:
        return open_backend(self.server.prefix(), {**self.server.options, "part_bytes": PART_BYTES})

    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        bucket, _, prefix = backend.url.removeprefix("s3://").partition("/")
        self.client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=data)

    def raw_names(self, backend: Backend) -> set[str]:
        return names_below(self.client, backend.url)

    async def test_checksums_of_put_and_head_agree(self, backend: Backend) -> None:
        put = await backend.put("small", b"bytes")
        assert put.checksum == f"crc32c:{checksum_of(b'bytes').hex()}" == (await backend.head("small")).checksum
        data = patterned(2 * PART_BYTES + 1)
        parts = [checksum_of(data[at : at + PART_BYTES]) for at in range(0, len(data), PART_BYTES)]
        put = await backend.put("big", data)
        assert put.checksum == "crc32c:" + ",".join(part.hex() for part in parts)
        assert (await backend.head("big")).checksum == f"crc32c-of:{checksum_of(b''.join(parts)).hex()}-3"

    async def test_conditional_puts_have_a_limit(self, backend: Backend) -> None:
        large = memoryview(mmap.mmap(-1, CONDITIONAL_PUT_BYTES_MAX + 1))
        with pytest.raises(UsageError, match="at most"):
            await backend.put("x", large, if_absent=True)

    async def test_self_test_finds_nothing_wrong(self, backend: Backend) -> None:
        assert isinstance(backend, SelfTesting)
        found: list[Finding] = await backend.self_test()
        assert {finding.subject: finding.level for finding in found} == dict.fromkeys(
            ("route", "bytes", "conditional put", "checksums", "clock"), "ok"
        )
        assert self.raw_names(backend) == set()


async def test_signed_payloads_and_the_environment(s3_server: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every AWS tool takes them: no option but the one that is tested."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    backend = open_backend(s3_server.prefix(), {"sign_payload": True})
    try:
        await backend.put("x", b"signed")
        assert await backend.get("x", limit_bytes=6) == b"signed"
    finally:
        await backend.aclose()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "http://x"}, "unknown storage option endpoint"),
        ({"access_key_id": "a"}, "belong together"),
        ({"secret_access_key": 123456789}, "expected a string"),
        ({"part_bytes": 1 << 20}, "between 5 MiB and 5 GiB"),
        ({"inflight_max": 0}, "between 1 and 256"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        open_backend("s3://bucket/run", options)
    assert "123456789" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3:///run", "s3://bucket/a//b", "s3://bucket/run?versionId=1"])
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_backend(url)


def test_secrets_do_not_show() -> None:
    given = {"access_key_id": "name", "secret_access_key": "hidden", "session_token": "hidden"}
    options = checked_options(S3Options, given, url="s3://bucket")
    assert "hidden" not in repr(options)
    assert "***" in repr(options)
    with pytest.raises(TypeError):
        msgspec.json.encode(options)
