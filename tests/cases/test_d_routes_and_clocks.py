"""Credentials, regions, clocks and routes to object storage: what is wrong before a byte is sent."""

from __future__ import annotations

import asyncio
import datetime
import logging
import uuid
from pathlib import Path

import pytest

from ckptd.errors import (
    ClockSkewed,
    ConfigError,
    CredentialsExpired,
    StorageError,
    Unavailable,
)
from ckptd.storage import Backend
from ckptd_backends.testing import listed
from ckptd_backends.wrappers import Retrying
from devtools.seaweedfs import S3Endpoint
from tests.servers import fault_proxy as faults
from tests.servers.fault_proxy import FaultProxy, refuse
from tests.servers.proxied import BIG, QUICK, content, findings, opened, raw_client


def write_credentials(path: Path, access_key_id: str, secret_access_key: str) -> None:
    path.write_text(f"[job]\naws_access_key_id = {access_key_id}\naws_secret_access_key = {secret_access_key}\n")


async def test_r96_credentials_are_read_again_and_the_upload_goes_on(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expired from the second part on, until the file is written anew."""
    file = tmp_path / "credentials"
    write_credentials(file, "OLDKEY", "old secret")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def has_old_key(seen: faults.Exchange) -> bool:
        return "Credential=OLDKEY/" in seen.headers["authorization"]

    def expire(exchange: faults.Exchange) -> None:
        write_credentials(file, proxy.server.access_key_id, proxy.server.secret_access_key)
        refuse(400, "ExpiredToken")(exchange)

    proxy.fault("UploadPart", faults.one_after_another(faults.sign_anew, expire), times=99, when=has_old_key)
    proxy.fault("*", faults.sign_anew, times=99, when=has_old_key)
    plain = {"access_key_id": None, "secret_access_key": None, "profile": "job", "inflight_max": 1}
    async with opened(proxy, **plain) as store:
        await store.put("x", BIG)
        assert proxy.count("UploadPart") == 4  # the part that was refused, and none of those before it
        assert await content(store, "x", len(BIG)) == BIG
        proxy.fault("HeadObject", refuse(400, ""))
        proxy.fault("GetObject", refuse(400, "ExpiredToken"))
        with pytest.raises(CredentialsExpired):  # a HEAD has no room for the reason
            await store.head("x")
    async with opened(proxy, **plain | {"profile": "nobody"}) as store:
        with pytest.raises(StorageError, match="credentials"):
            await store.get("x", limit_bytes=1)


async def test_r102_custom_endpoints_have_the_bucket_in_the_path(proxy: FaultProxy) -> None:
    by_name = proxy.endpoint_url.replace("127.0.0.1", "localhost")
    async with opened(proxy, endpoint_url=by_name) as store:
        await store.put("x", b"x")
    assert all(seen.target.startswith(f"/{proxy.server.bucket}") for seen in proxy.seen)
    async with opened(proxy, endpoint_url="http://no-such-host.invalid", addressing_style="virtual") as store:
        with pytest.raises(Unavailable, match=f"{proxy.server.bucket}.no-such-host.invalid"):
            await store.get("x", limit_bytes=1)


@pytest.mark.parametrize("answer", ["301", "400"])
async def test_r103_the_right_region_is_learnt_once(proxy: FaultProxy, answer: str) -> None:
    wrong = (
        refuse(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"})
        if answer == "301"
        else refuse(400, "AuthorizationHeaderMalformed", Region="eu-west-1")
    )
    proxy.fault("*", wrong, times=99, when=lambda seen: "/eu-west-1/s3/" not in seen.headers["authorization"])
    proxy.fault("*", faults.sign_anew, times=99)
    async with opened(proxy) as store:
        await store.put("x", b"x")
        await store.put("y", BIG)
        assert await store.get("x", limit_bytes=1) == b"x"
    regions = [seen.headers["authorization"].split("/")[2] for seen in proxy.seen]
    assert regions == ["us-east-1", *["eu-west-1"] * (len(regions) - 1)]
    assert proxy.count("PutBucket") == 0


async def test_r103_a_region_that_stays_wrong_is_an_error(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("*", refuse(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"}), times=99)
    with pytest.raises(ConfigError, match="region='eu-west-1'"):
        await store.put("x", b"x")
    assert len(proxy.seen) == 2


async def test_r103_buckets_are_made_only_when_told(proxy: FaultProxy) -> None:
    bucket = f"new-{uuid.uuid4().hex[:12]}"
    async with opened(proxy, url=f"s3://{bucket}/run") as store:
        for attempt in (store.put("x", b"x"), store.get("x", limit_bytes=1), store.head("x"), listed(store)):
            with pytest.raises(ConfigError, match="does not exist"):
                await attempt
    assert proxy.count("PutBucket") == 0
    try:
        async with opened(proxy, url=f"s3://{bucket}/run", create_bucket=True) as store:
            await store.put("x", b"x")
            assert await store.get("x", limit_bytes=1) == b"x"
            await store.delete(["x"])
    finally:
        with raw_client(proxy.server) as client:
            client.delete_bucket(Bucket=bucket)


async def test_r104_each_attempt_is_signed_when_it_is_sent(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("UploadPart", refuse(503, "SlowDown"), times=7)
    await store.put("x", BIG)
    for seen in proxy.seen:
        signed = datetime.datetime.strptime(seen.headers["x-amz-date"], "%Y%m%dT%H%M%S%z").timestamp()
        assert -1 <= seen.moment - signed <= 2


async def test_r104_a_wrong_clock_is_reported_with_both_times(
    store: Backend, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own judgement; only what botocore takes for the time is false."""
    ahead = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=20)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_: ahead)
    with pytest.raises(ClockSkewed, match=r"this machine's clock says .*, the store's says "):
        await Retrying(store, QUICK).put("x", b"x")
    assert proxy.count("PutObject") == 1


async def test_r105_as_many_connections_as_threads(proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with opened(proxy, inflight_max=32, no_progress_seconds=20) as store:
        for key in ("x", "y"):
            await asyncio.gather(*(store.put(f"{key}/{number}", b"small") for number in range(64)))
            await asyncio.gather(*(content(store, f"{key}/{number}", 5) for number in range(64)))
    assert proxy.connections <= 32
    assert "pool is full" not in caplog.text


async def test_r106_proxy_variables_are_honoured_and_told(
    proxy: FaultProxy, s3_server: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with opened(proxy) as store:
        await store.put("x", b"x")
        assert (await findings(store))["route"].message == f"{proxy.endpoint_url}, directly"
    monkeypatch.delenv("NO_PROXY")
    async with opened(proxy) as store:
        with pytest.raises(Unavailable):
            await store.put("x", b"x")
    monkeypatch.setenv("HTTP_PROXY", proxy.endpoint_url.replace("http://", "http://user:secret@"))
    proxy.forget()
    async with opened(proxy, endpoint_url=s3_server.endpoint_url) as store:
        await store.put("x", b"x")
        route = (await findings(store))["route"].message
    assert proxy.count("PutObject") > 0
    assert route == f"{s3_server.endpoint_url}, through the proxy {proxy.endpoint_url}"
