"""Whom a store trusts, and whom ckptd does: TLS, encryption at rest, credentials that are renewed, least privilege."""

from __future__ import annotations

import json
import shlex
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import AccessDenied, Unavailable
from ckptd.storage import Backend, LeavingUploads, SelfTesting
from ckptd_backends.testing import listed
from ckptd_backends.wrappers import Retrying
from devtools.seaweedfs import LIMITED_PREFIX, S3Endpoint, SeaweedFS
from tests.servers import fault_proxy as faults
from tests.servers.fault_proxy import FaultProxy, refuse
from tests.servers.proxied import BIG, QUICK, content, opened

ROOT = Path(__file__).parent.parent.parent


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signed by itself, for this machine; the key lies beside it."""
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", "2", "-subj", "/CN=ckptd test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*argv, "-keyout", path.with_suffix(".key"), "-out", path], check=True, capture_output=True)
    return path


@pytest.fixture
def tls_proxy(s3_server: S3Endpoint, certificate: Path) -> Iterator[FaultProxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with FaultProxy(s3_server, tls=context) as proxy:
        yield proxy


@pytest.mark.filterwarnings("ignore:Unverified HTTPS")
async def test_a_private_authority_is_named_or_refused(
    tls_proxy: FaultProxy, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tls_proxy) as store:
        with pytest.raises(AccessDenied, match="AWS_CA_BUNDLE") as refused:
            await Retrying(store, QUICK).put("x", b"x")
        assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value)
    assert tls_proxy.seen == []
    for options in ({"ca_bundle": str(certificate)}, {"verify": False}):
        async with opened(tls_proxy, **options) as store:
            await store.put("x", BIG)
            assert await content(store, "x", len(BIG)) == BIG
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    async with opened(tls_proxy) as store:
        await store.put("x", b"x")


async def test_a_tls_connection_that_breaks_may_be_tried_again(tls_proxy: FaultProxy, certificate: Path) -> None:
    """In the middle of a request, and in the handshake."""
    async with opened(tls_proxy, ca_bundle=str(certificate)) as store:
        tls_proxy.fault("PutObject", faults.cut)
        tls_proxy.fault("GetObject", faults.truncate(1 << 20), times=2)
        retrying = Retrying(store, QUICK)
        await retrying.put("x", b"x")
        await retrying.put("y", BIG)
        assert await content(retrying, "y", len(BIG)) == BIG
        assert tls_proxy.unmet() == []
    with FaultProxy(tls_proxy.server) as plain:
        plain.hang_up_at_once = True
        endpoint = plain.endpoint_url.replace("http:", "https:")
        async with opened(plain, endpoint_url=endpoint, ca_bundle=str(certificate)) as store:
            with pytest.raises(Unavailable):
                await store.put("x", b"x")


# Encryption at rest


async def test_encryption_is_asked_for_with_each_object(proxy: FaultProxy) -> None:
    header = "x-amz-server-side-encryption"
    async with opened(proxy, server_side_encryption="AES256") as store:
        await store.put("x", b"x")
        await store.put("once", b"x", if_absent=True)
        await store.put("y", BIG)
        assert await content(store, "y", len(BIG)) == BIG
        assert await store.get("x", limit_bytes=1) == b"x"
    creating = [seen for seen in proxy.seen if seen.operation in ("PutObject", "CreateMultipartUpload")]
    assert len(creating) == 3
    assert {seen.headers.get(header) for seen in creating} == {"AES256"}
    proxy.forget()

    def without_keys(exchange: faults.Exchange) -> None:
        exchange.reply(exchange.pass_on_signed_anew(without=(header, f"{header}-aws-kms-key-id")))

    for operation in ("PutObject", "CreateMultipartUpload"):
        proxy.fault(operation, without_keys, times=9)
    async with opened(proxy, server_side_encryption="aws:kms", sse_kms_key_id="alias/job") as store:
        await store.put("x", b"x")
        await store.put("y", BIG)
    creating = [seen for seen in proxy.seen if seen.operation in ("PutObject", "CreateMultipartUpload")]
    asked = {(seen.headers.get(header), seen.headers.get(f"{header}-aws-kms-key-id")) for seen in creating}
    assert asked == {("aws:kms", "alias/job")}


# Credentials


async def test_r96_a_credential_process_is_asked_again(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer says that it is good for an hour, and the store says that it has expired."""
    asked, program = tmp_path / "asked", tmp_path / "program.py"
    server = proxy.server
    program.write_text(
        f"asked = open({str(asked)!r}, 'a+')\n"
        "asked.write('x'); asked.seek(0)\n"
        "first = len(asked.read()) == 1\n"
        "import datetime, json\n"
        "until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)\n"
        f"keys = ('OLDKEY', 'old') if first else ({server.access_key_id!r}, {server.secret_access_key!r})\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': keys[0], 'SecretAccessKey': keys[1],"
        " 'Expiration': until.isoformat()}))\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[profile job]\ncredential_process = {shlex.join([sys.executable, str(program)])}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    expired = refuse(400, "ExpiredToken")
    proxy.fault("*", expired, times=99, when=lambda seen: "Credential=OLDKEY/" in seen.headers["authorization"])
    plain: dict[str, Any] = {"access_key_id": None, "secret_access_key": None, "profile": "job"}
    async with opened(proxy, **plain) as store:
        await Retrying(store, QUICK).put("x", BIG)
        assert await content(store, "x", len(BIG)) == BIG
    assert asked.read_text() == "xx"


# Permissions

PERMISSIONS = {
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "DeleteObjects": "s3:DeleteObject",
    "DeleteObject": "s3:DeleteObject",
}
"""What AWS asks for each request."""


async def use_everything(store: Backend, proxy: FaultProxy) -> None:
    """Every request that the backend can make."""
    assert isinstance(store, SelfTesting)
    assert isinstance(store, LeavingUploads)
    await store.self_test()
    proxy.fault("CreateMultipartUpload", faults.lose_answer)
    with pytest.raises(Unavailable):
        await store.put("y", BIG)  # aborted by its name
    await store.put("y", BIG)
    await store.put("x", b"x", if_absent=True)
    await store.head("x")
    assert await content(store, "y", len(BIG)) == BIG
    assert await listed(store) == ["x", "y"]
    await store.delete(["x", "y"])
    await store.abort_stale_uploads()


async def test_the_policy_grants_what_is_used_and_nothing_else(proxy: FaultProxy, tmp_path: Path) -> None:
    async with opened(proxy, tmp_path) as store:
        await use_everything(store, proxy)
    prefix = store.url.removeprefix(f"s3://{proxy.server.bucket}/")
    policy = json.loads((ROOT / "deploy/s3-policy.json").read_text())
    granted = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert {PERMISSIONS[seen.operation] for seen in proxy.seen} == granted
    listing = [seen.target for seen in proxy.seen if seen.operation == "ListObjectsV2"]
    assert all(f"prefix={prefix}%2F" in target for target in listing)  # the policy's condition
    resources = {resource for statement in policy["Statement"] for resource in statement["Resource"]}
    assert resources == {"arn:aws:s3:::BUCKET", "arn:aws:s3:::BUCKET/PREFIX/*"}


async def test_a_user_who_may_do_that_below_one_prefix_needs_no_more(s3_server: S3Endpoint, tmp_path: Path) -> None:
    """The server's own judgement."""
    if not isinstance(s3_server, SeaweedFS):
        pytest.skip("needs an S3 server of our own")
    limited = s3_server.limited
    url = s3_server.prefix().replace(f"{s3_server.bucket}/", f"{s3_server.bucket}/{LIMITED_PREFIX}/")
    with FaultProxy(limited) as proxy:
        async with opened(proxy, tmp_path, url) as store:
            await use_everything(store, proxy)
        elsewhere = s3_server.prefix()
        async with opened(proxy, url=elsewhere) as store:
            with pytest.raises(AccessDenied, match="allow s3:GetObject") as refused:
                await store.get("run.json", limit_bytes=9)
            assert f"{elsewhere}/run.json" in str(refused.value)
            with pytest.raises(AccessDenied, match="allow s3:ListBucket"):
                await listed(store)
            with pytest.raises(AccessDenied, match="allow s3:PutObject"):
                await store.put("x", b"x")
