"""Every fault against every operation: it costs another attempt, or it is an error that says what, where and why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from ckptd.errors import (
    AccessDenied,
    ClockSkewed,
    ConfigError,
    StorageFull,
)
from ckptd.limits import KIB, MIB
from ckptd.storage import Backend
from ckptd_backends.testing import listed, patterned
from ckptd_backends.wrappers import Retrying
from devtools.processes import wait_until
from tests.servers import fault_proxy as faults
from tests.servers.fault_proxy import FaultProxy, page_of_a_gateway, refuse
from tests.servers.proxied import QUICK, content, open_uploads, opened

SMALL = b"a small object"
LARGE = patterned(5 * MIB + 100 * KIB)
"""Two parts."""


@dataclass(frozen=True)
class Operation:
    """What a backend does below a folder of its own, the requests that makes, and a proof that it was done."""

    name: str
    requests: tuple[str, ...]
    work: Callable[[Backend, str], Awaitable[None]]


async def _put(store: Backend, folder: str) -> None:
    await store.put(f"{folder}/new", SMALL)
    assert await content(store, f"{folder}/new", len(SMALL)) == SMALL


async def _put_once(store: Backend, folder: str) -> None:
    await store.put(f"{folder}/new", SMALL, if_absent=True)
    assert await content(store, f"{folder}/new", len(SMALL)) == SMALL


async def _put_large(store: Backend, folder: str) -> None:
    await store.put(f"{folder}/new", LARGE)
    assert await content(store, f"{folder}/new", len(LARGE)) == LARGE


async def _get(store: Backend, folder: str) -> None:
    assert await store.get(f"{folder}/there", limit_bytes=100) == SMALL


async def _read(store: Backend, folder: str) -> None:
    assert await content(store, f"{folder}/there", len(SMALL)) == SMALL


async def _head(store: Backend, folder: str) -> None:
    assert (await store.head(f"{folder}/there")).size_bytes == len(SMALL)


async def _scan(store: Backend, folder: str) -> None:
    assert [info.key async for info in store.scan(f"{folder}/")] == [f"{folder}/there"]


async def _delete(store: Backend, folder: str) -> None:
    await store.delete([f"{folder}/there"])
    assert [info.key async for info in store.scan(f"{folder}/")] == []


OPERATIONS = (
    Operation("put", ("PutObject",), _put),
    Operation("once", ("PutObject",), _put_once),
    Operation("large", ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"), _put_large),
    Operation("get", ("GetObject",), _get),
    Operation("read", ("GetObject",), _read),
    Operation("head", ("HeadObject",), _head),
    Operation("scan", ("ListObjectsV2",), _scan),
    Operation("delete", ("DeleteObjects",), _delete),
)


def _inject(proxy: FaultProxy, fault: faults.Fault, *, times: float = 1) -> None:
    """Each kind of request of each operation meets the fault."""
    for operation in OPERATIONS:
        for request in operation.requests:
            folder = f"/{operation.name}/"

            def mine(seen: faults.Exchange, folder: str = folder) -> bool:
                if seen.operation == "DeleteObjects":
                    return True
                return folder in seen.target or folder.replace("/", "%2F") in seen.target

            proxy.fault(request, fault, times=times, when=mine)


async def _prepare(store: Backend) -> None:
    for operation in OPERATIONS:
        await store.put(f"{operation.name}/there", SMALL)


REFUSALS = (
    refuse(503, "SlowDown"),
    refuse(500, "InternalError"),
    refuse(429, "TooManyRequests"),
    refuse(400, "RequestTimeout"),
    page_of_a_gateway(502),
)
PASSING: dict[str, Callable[[], faults.Fault]] = {
    "refused": lambda: faults.in_turn(*REFUSALS),
    "cut": lambda: faults.cut,
    "lost-answer": lambda: faults.lose_answer,
    "twice": lambda: faults.deliver_twice,
    "silent": lambda: faults.silent,
    "silent-after-headers": lambda: faults.silent_after_headers,
}


@pytest.mark.parametrize("name", PASSING)
async def test_r92_r93_what_passes_costs_another_attempt(store: Backend, proxy: FaultProxy, name: str) -> None:
    await _prepare(store)
    _inject(proxy, PASSING[name]())
    retrying = Retrying(store, QUICK)
    await asyncio.gather(*(operation.work(retrying, operation.name) for operation in OPERATIONS))
    assert proxy.unmet() == []
    if name != "twice":  # nobody has heard of the second upload: that is for the bucket's own rule
        assert open_uploads(proxy.server, store.url) == []


WRITING = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "ListObjectsV2")


@pytest.mark.parametrize("fault", [page_of_a_gateway(200), faults.empty_answer], ids=["page", "empty"])
async def test_a_success_that_is_not_the_stores_is_none(store: Backend, proxy: FaultProxy, fault: faults.Fault) -> None:
    """A gateway that says 200 to anything: nothing was stored, and nothing is not there."""
    await _prepare(store)
    for request in WRITING:
        proxy.fault(request, fault)
    retrying = Retrying(store, QUICK)
    await asyncio.gather(*(operation.work(retrying, operation.name) for operation in OPERATIONS[:3]))
    await _scan(retrying, "scan")
    assert proxy.unmet() == []


REFUSED = {
    "denied": (refuse(403, "AccessDenied"), AccessDenied, "s3-policy.json"),
    "unknown key": (refuse(403, "InvalidAccessKeyId"), AccessDenied, "AWS_ACCESS_KEY_ID"),
    "skewed": (refuse(403, "RequestTimeTooSkewed"), ClockSkewed, "NTP"),
    "no bucket": (refuse(404, "NoSuchBucket"), ConfigError, "create_bucket"),
    "full": (refuse(507, "InsufficientStorage"), StorageFull, "room"),
    "307": (
        refuse(307, "TemporaryRedirect", headers={"x-amz-bucket-region": "us-east-1"}),
        ConfigError,
        "region='us-east-1'",
    ),
}


async def test_r103_r104_r107_what_stays_is_an_error_that_says_where(store: Backend, proxy: FaultProxy) -> None:
    await _prepare(store)
    for name, (fault, kind, hint) in REFUSED.items():
        proxy.forget()
        for request in {request for operation in OPERATIONS for request in operation.requests}:
            proxy.fault(request, fault, times=99)
        works = [operation.work(Retrying(store, QUICK), operation.name) for operation in OPERATIONS]
        for operation, outcome in zip(OPERATIONS, await asyncio.gather(*works, return_exceptions=True), strict=True):
            (error,) = outcome.exceptions if isinstance(outcome, ExceptionGroup) else (outcome,)
            assert isinstance(error, kind), (name, operation.name, error)
            text = str(error)
            assert f"s3://{proxy.server.bucket}/" in text, (name, text)
            assert f"{operation.name}/" in text, (name, text)
            assert hint in text, (name, text)
            assert proxy.server.secret_access_key not in text + repr(error)
        for request in ("PutObject", "CreateMultipartUpload", "ListObjectsV2", "DeleteObjects"):
            asked = [seen.target for seen in proxy.seen if seen.operation == request]
            assert len(asked) == len(set(asked)) * (2 if name == "307" else 1), "a refusal is not asked again"


async def test_r93_an_upload_that_crawls_is_not_cut(proxy: FaultProxy) -> None:
    """It takes several times as long as it may stand still."""
    with FaultProxy(proxy.server, receive_bytes=64 * KIB) as slow:
        slow.fault("UploadPart", faults.sluggish(1.5 * MIB), times=99)
        async with opened(slow) as store:
            await store.put("x", LARGE)
            assert slow.count("UploadPart") == 2
            assert await content(store, "x", len(LARGE)) == LARGE


@pytest.mark.parametrize("stall", [faults.silent, faults.deaf])
async def test_r93_a_cancelled_put_ends_although_the_store_is_silent(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, stall: faults.Fault
) -> None:
    """Neither the parts, nor a small put, nor the abort has the store's answer to wait for."""
    monkeypatch.setattr("ckptd_backends.s3_upload.ABORT_SECONDS", 0.3)
    async with opened(proxy, no_progress_seconds=600) as store:
        await store.put("warm", SMALL)
        for operation in ("UploadPart", "PutObject", "AbortMultipartUpload"):
            proxy.fault(operation, stall, times=99)
        puts = [asyncio.create_task(store.put("large", LARGE)), asyncio.create_task(store.put("small", SMALL))]
        await asyncio.to_thread(
            wait_until,
            lambda: (proxy.count("UploadPart"), proxy.count("PutObject")) == (2, 2),
            "the requests",
            deadline_seconds=20,
        )
        for put in puts:
            put.cancel()
        ended, _ = await asyncio.wait(puts, timeout=20)  # the proxy hangs up after 30
        assert len(ended) == 2
        assert all(put.cancelled() for put in puts)
        assert len(open_uploads(proxy.server, store.url)) == 1
        proxy.forget()
        await store.put("large", LARGE)  # the store answers again, so what was left open is made up for
        assert open_uploads(proxy.server, store.url) == []
        assert await listed(store) == ["large", "warm"]
