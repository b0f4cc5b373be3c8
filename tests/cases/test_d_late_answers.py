"""Answers that come late, twice, or mean something else; listings in pieces; bodies that stop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ckptd.errors import AlreadyExists, NotFound, StorageError, Unavailable
from ckptd.limits import KIB, MIB
from ckptd.storage import Backend
from ckptd_backends.testing import listed, patterned
from ckptd_backends.wrappers import Retrying
from tests.servers import fault_proxy as faults
from tests.servers.fault_proxy import FaultProxy, refuse
from tests.servers.proxied import QUICK, content, open_uploads

LARGE = patterned(5 * MIB + 100 * KIB)


async def test_r91_a_conditional_put_that_took_effect_wins_whatever_the_retry_hears(
    store: Backend, proxy: FaultProxy
) -> None:
    """Lost, then 409 as the first one is still going on, then 412."""
    conflict = refuse(409, "ConditionalRequestConflict")
    proxy.fault("PutObject", faults.one_after_another(faults.lose_answer, conflict), times=2)
    info = await Retrying(store, QUICK).put("manifest", b"mine", if_absent=True)
    assert (info.path_taken, proxy.count("PutObject")) == ("read back", 3)
    proxy.fault("PutObject", faults.one_after_another(conflict, conflict), times=2)
    with pytest.raises(AlreadyExists):
        await Retrying(store, QUICK).put("manifest", b"another's", if_absent=True)
    assert await store.get("manifest", limit_bytes=9) == b"mine"


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart", "CompleteMultipartUpload"])
async def test_r91_a_request_that_arrives_long_after_its_retry_changes_nothing(
    store: Backend, proxy: FaultProxy, operation: str
) -> None:
    release, delivered = threading.Event(), threading.Event()
    proxy.fault(operation, faults.deliver_late(release, delivered))
    retrying = Retrying(store, QUICK)
    conditional = operation == "PutObject"
    data = b"mine" if conditional else LARGE
    await retrying.put("x", data, if_absent=conditional)
    release.set()
    assert await asyncio.to_thread(delivered.wait, 20)
    assert await content(store, "x", len(data)) == data
    assert await listed(store) == ["warm", "x"]
    assert open_uploads(proxy.server, store.url) == []


async def test_listings_of_three_at_a_time(store: Backend, proxy: FaultProxy) -> None:
    keys = [f"s/{number:02d}" for number in range(8)]
    await asyncio.gather(*(store.put(key, b"x") for key in keys))
    proxy.fault("ListObjectsV2", faults.pages_of(3), times=99)
    assert [info.key async for info in store.scan("s/")] == keys
    assert proxy.count("ListObjectsV2") == 3
    proxy.fault("ListObjectsV2", refuse(503, "SlowDown"))
    assert [info.key async for info in Retrying(store, QUICK).scan("s/")] == keys


async def test_a_listing_that_does_not_move_on_ends(store: Backend, proxy: FaultProxy) -> None:
    page = (
        b"<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated>"
        b"<NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    )
    proxy.fault("ListObjectsV2", lambda exchange: exchange.reply(faults.Answer(200, {}, page)), times=99)
    with pytest.raises(StorageError, match="does not move on"):
        await listed(store)
    assert proxy.count("ListObjectsV2") == 2


async def test_r83_not_there_is_what_the_store_says_and_nobody_else(store: Backend, proxy: FaultProxy) -> None:
    """403 and a gateway's own 404 say that it cannot be told."""
    with pytest.raises(NotFound):
        await store.head("nothing")
    with pytest.raises(NotFound):
        await store.get("nothing", limit_bytes=9)
    for operation, call in (
        ("GetObject", lambda: store.get("warm", limit_bytes=9)),
        ("HeadObject", lambda: store.head("warm")),
        ("ListObjectsV2", lambda: listed(store)),
    ):
        proxy.fault(operation, faults.page_of_a_gateway(404))
        with pytest.raises(Unavailable, match="endpoint_url"):
            await call()
        proxy.fault(operation, refuse(403, "AccessDenied"))
        with pytest.raises(StorageError, match=r"AccessDenied|403") as refused:
            await call()
        assert not isinstance(refused.value, NotFound)
    assert proxy.unmet() == []


async def test_r101_a_body_without_a_length_is_not_taken(store: Backend, proxy: FaultProxy) -> None:
    """Cut at 70 %, and nothing tells that it was."""
    await store.put("x", LARGE)
    proxy.fault("GetObject", faults.without_length, times=2)
    with pytest.raises(Unavailable, match="how long"):
        await store.get("x", limit_bytes=len(LARGE))
    assert await content(store, "x", len(LARGE)) == LARGE
    assert proxy.unmet() == []
