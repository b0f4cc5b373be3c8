"""Object storage that fails in every way it is known to: a real server, and a real proxy for what that cannot do.

The trainer takes no part in uploads, so what these cases ask of it ("no collective waits for an upload") holds by
construction; here the backend has to be right, and to end in bounded time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import (
    AlreadyExists,
    NotFound,
    StorageError,
    StorageFull,
    TooLarge,
    Unavailable,
)
from ckptd.limits import MIB
from ckptd.storage import Backend, LeavingUploads
from ckptd_backends.s3_options import OBJECT_BYTES_MAX, PART_BYTES_MAX, part_bytes_for
from ckptd_backends.testing import listed
from ckptd_backends.wrappers import Retrying, RetryPolicy
from devtools.processes import wait_until
from tests.servers import fault_proxy as faults
from tests.servers.fault_proxy import FaultProxy, refuse
from tests.servers.proxied import BIG, QUICK, content, findings, open_uploads, opened

# The store does not keep what it was given


async def test_r86_default_uploads_have_no_framing(store: Backend, proxy: FaultProxy) -> None:
    await store.put("small", b"plain")
    await store.put("big", BIG)
    uploads = [exchange for exchange in proxy.seen if exchange.operation in ("PutObject", "UploadPart")]
    assert len(uploads) == 4
    for exchange in uploads:
        assert "x-amz-trailer" not in exchange.headers
        assert "aws-chunked" not in exchange.headers.get("content-encoding", "")
        assert exchange.headers["x-amz-checksum-crc32c"]


async def test_r86_self_test_finds_a_store_that_keeps_the_framing(store: Backend, proxy: FaultProxy) -> None:
    found = await findings(store)
    assert {finding.level for finding in found.values()} == {"ok"}, found
    proxy.fault("PutObject", faults.keep_framing)
    assert (await findings(store))["bytes"].level == "error"
    assert await listed(store) == ["warm"]


async def test_self_test_finds_an_ignored_condition(store: Backend, proxy: FaultProxy) -> None:
    assert (await findings(store))["conditional put"].level == "ok"
    assert store.capabilities.put_if_absent
    proxy.fault("PutObject", faults.ignore_condition, times=9, when=lambda seen: "if-none-match" in seen.headers)
    assert (await findings(store))["conditional put"].level == "error"
    assert not store.capabilities.put_if_absent
    with pytest.raises(AlreadyExists):
        await store.put("warm", b"other", if_absent=True)


async def test_self_test_finds_a_store_that_does_not_check(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("PutObject", faults.ignore_checksum, times=9)
    assert (await findings(store))["checksums"].level == "warning"


@pytest.mark.parametrize(("status", "code"), [(411, "MissingContentLength"), (400, "InvalidArgument")])
async def test_r87_refused_uploads_say_what_to_do(store: Backend, proxy: FaultProxy, status: int, code: str) -> None:
    def is_modern(seen: faults.Exchange) -> bool:
        return "x-amz-trailer" in seen.headers or "aws-chunked" in seen.headers.get("content-encoding", "")

    proxy.fault("*", refuse(status, code), times=99, when=is_modern)
    await store.put("small", b"plain")
    await store.put("big", BIG)
    proxy.fault("PutObject", refuse(status, code), when=lambda seen: "x-amz-checksum-crc32c" in seen.headers)
    with pytest.raises(StorageError, match="checksum='none'"):
        await store.put("refused", b"x")
    async with opened(proxy, checksum="none") as plain:
        await plain.put("x", BIG)
        assert await content(plain, "x", len(BIG)) == BIG


# The answer to completing an upload


async def test_r91_a_lost_answer_to_complete_is_settled_by_head(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("CompleteMultipartUpload", faults.lose_answer)
    info = await store.put("x", BIG)
    assert info.size_bytes == len(BIG)
    assert (proxy.count("CompleteMultipartUpload"), proxy.count("HeadObject")) == (1, 1)
    assert await content(store, "x", len(BIG)) == BIG


async def test_r91_a_completed_upload_that_is_gone_is_success(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault(
        "CompleteMultipartUpload", faults.one_after_another(faults.lose_answer, refuse(404, "NoSuchUpload")), times=2
    )
    proxy.fault("HeadObject", refuse(503, "SlowDown"))
    await store.put("x", BIG)
    assert proxy.count("CompleteMultipartUpload") == 2
    assert await content(store, "x", len(BIG)) == BIG


async def test_r91_another_object_of_the_same_size_is_no_success(store: Backend, proxy: FaultProxy) -> None:
    await store.put("x", BIG)
    proxy.fault("CompleteMultipartUpload", refuse(404, "NoSuchUpload"))
    with pytest.raises(Unavailable):
        await store.put("x", BIG[::-1])
    assert await content(store, "x", len(BIG)) == BIG


async def test_r91_an_error_in_a_success_is_an_error(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("CompleteMultipartUpload", faults.error_in_success("InternalError"))
    await store.put("x", BIG)
    assert proxy.count("CompleteMultipartUpload") == 2
    assert await content(store, "x", len(BIG)) == BIG


async def test_a_lost_answer_to_a_conditional_put_is_read_back(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("PutObject", faults.lose_answer)
    info = await Retrying(store, QUICK).put("commit", b"mine", if_absent=True)
    assert (info.size_bytes, info.path_taken) == (4, "read back")
    proxy.fault("PutObject", faults.cut)
    with pytest.raises(AlreadyExists):
        await Retrying(store, QUICK).put("commit", b"else", if_absent=True)


# The store is busy, or says nothing


async def test_r92_one_rank_slowed_down_does_not_hold_the_others(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("UploadPart", refuse(503, "SlowDown"), times=10, when=lambda seen: "/rank-1?" in seen.target)
    ranks = {rank: asyncio.create_task(Retrying(store).put(f"rank-{rank}", BIG)) for rank in range(2)}
    await ranks[0]
    assert not ranks[1].done()
    await ranks[1]
    assert await content(store, "rank-1", len(BIG)) == BIG


async def test_r92_slow_down_for_ever_ends_in_an_error(proxy: FaultProxy) -> None:
    async with opened(proxy, part_attempts_max=2) as store:
        proxy.fault("UploadPart", refuse(503, "SlowDown"), times=10**9)
        retrying = Retrying(store, RetryPolicy(attempts_max=2, delay_seconds=0.02, delay_seconds_max=0.1))
        with pytest.raises(Unavailable, match="SlowDown"):
            await retrying.put("x", BIG)
        assert await listed(store) == []
        assert open_uploads(proxy.server, store.url) == []


@pytest.mark.parametrize("stall", [faults.silent, faults.deaf])
async def test_r93_a_stalled_part_is_sent_again(store: Backend, proxy: FaultProxy, stall: faults.Fault) -> None:
    proxy.fault("UploadPart", stall)
    await store.put("x", BIG)
    assert proxy.count("UploadPart") > 3  # the parts, and the stalled one again
    assert await content(store, "x", len(BIG)) == BIG


async def test_r93_a_download_that_crawls_is_cut(
    store: Backend, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("x", BIG)
    proxy.fault("GetObject", faults.trickle)
    assert await content(store, "x", len(BIG)) == BIG
    assert "stood still" in caplog.text


async def test_r93_a_store_that_never_answers_is_unavailable(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("*", faults.silent, times=9)
    with pytest.raises(Unavailable):
        await store.get("warm", limit_bytes=10)


async def test_a_cancelled_upload_is_aborted(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("UploadPart", faults.silent, times=9)
    put = asyncio.create_task(store.put("x", BIG))
    await asyncio.to_thread(wait_until, lambda: proxy.count("UploadPart") == 3, "all parts", deadline_seconds=10)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert open_uploads(proxy.server, store.url) == []


# Limits


@given(st.integers(1, OBJECT_BYTES_MAX), st.sampled_from([5 * MIB, 16 * MIB, 64 * MIB]))
def test_r94_every_size_fits_into_ten_thousand_parts(size: int, wished: int) -> None:
    part = part_bytes_for(size, wished)
    assert -(-size // part) <= 10_000
    assert wished <= part <= PART_BYTES_MAX
    assert part % MIB == 0


async def test_r95_an_object_over_the_limit_of_one_put_fails_aloud(store: Backend, proxy: FaultProxy) -> None:
    def is_large(seen: faults.Exchange) -> bool:
        return int(seen.headers["content-length"]) > MIB

    proxy.fault("PutObject", refuse(413, "EntityTooLarge"), times=99, when=is_large)
    with pytest.raises(TooLarge):
        await store.put("x", bytes(2 * MIB))
    with pytest.raises(NotFound):
        await store.head("x")
    await store.put("y", BIG)  # above the size of a part nothing goes in one put
    proxy.fault("UploadPart", refuse(413, "EntityTooLarge"))
    with pytest.raises(TooLarge):
        await store.put("z", BIG)
    assert await listed(store) == ["warm", "y"]
    assert open_uploads(proxy.server, store.url) == []


async def test_r107_a_full_store_is_not_asked_again(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("PutObject", refuse(507, "InsufficientStorage"), times=99)
    proxy.fault("UploadPart", refuse(507, "XMinioStorageFull"), times=99)
    retrying = Retrying(store, QUICK)
    with pytest.raises(StorageFull):
        await retrying.put("x", b"x")
    assert proxy.count("PutObject") == 1
    with pytest.raises(StorageFull):
        await retrying.put("x", BIG)
    assert proxy.count("UploadPart") <= 3
    await retrying.delete(["warm"])
    assert await listed(store) == []


# Uploads that nobody ends, downloads that end early

HANGING_PUT = """
import asyncio, json, sys
from pathlib import Path
from ckptd.storage import open_backend
from ckptd_backends.testing import Filling

async def main(url, options, state_dir):
    source = Filling(bytes(11 << 20), hang_at=(11 << 20) - 1)
    put = asyncio.create_task(open_backend(url, options, state_dir=Path(state_dir)).put("killed", source))
    await source.hung.wait()
    await asyncio.sleep(0.3)
    print("hangs", flush=True)
    await put

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
"""


async def test_r97_uploads_of_a_killed_writer_are_aborted(proxy: FaultProxy, tmp_path: Path) -> None:
    url = proxy.server.prefix()
    argv = [sys.executable, "-c", HANGING_PUT, url, json.dumps(proxy.options), str(tmp_path)]
    writer = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert writer.stdout is not None
    assert await asyncio.wait_for(writer.stdout.readline(), 20) == b"hangs\n"
    async with opened(proxy, tmp_path, url) as store, opened(proxy, tmp_path) as elsewhere:
        assert isinstance(store, LeavingUploads)
        assert isinstance(elsewhere, LeavingUploads)
        assert await store.abort_stale_uploads() == 0  # its writer lives
        assert len(open_uploads(proxy.server, url)) == 1
        writer.kill()
        await writer.wait()
        assert await elsewhere.abort_stale_uploads() == 0  # not below its root
        assert await store.abort_stale_uploads() == 1
        assert open_uploads(proxy.server, url) == []
        assert await store.abort_stale_uploads() == 0


async def test_r97_an_abort_that_failed_is_made_up_for(store: Backend, proxy: FaultProxy) -> None:
    assert isinstance(store, LeavingUploads)
    proxy.fault("UploadPart", refuse(403, "AccessDenied"))
    proxy.fault("AbortMultipartUpload", faults.cut)
    with pytest.raises(StorageError, match="AccessDenied"):
        await store.put("x", BIG)
    assert len(open_uploads(proxy.server, store.url)) == 1
    assert await store.abort_stale_uploads() == 1
    assert open_uploads(proxy.server, store.url) == []


async def test_r97_an_upload_whose_id_was_lost_is_aborted(store: Backend, proxy: FaultProxy) -> None:
    proxy.fault("CreateMultipartUpload", faults.lose_answer)
    with pytest.raises(Unavailable):
        await store.put("x", BIG)
    assert open_uploads(proxy.server, store.url) == []


async def test_r101_a_body_that_breaks_off_is_fetched_again(store: Backend, proxy: FaultProxy) -> None:
    await store.put("x", BIG)
    proxy.fault("GetObject", faults.truncate(MIB // 2), times=2)
    assert await content(store, "x", len(BIG)) == BIG
    ranges = [seen.headers["range"] for seen in proxy.seen if seen.operation == "GetObject"]
    assert len(ranges) == 5
    assert len(set(ranges)) == 3
    proxy.fault("GetObject", faults.truncate(1))
    assert await Retrying(store, QUICK).get("warm", limit_bytes=10) == b"up"


async def test_deletes_that_fail_are_collected(store: Backend, proxy: FaultProxy) -> None:
    keys = [f"d/{number}" for number in range(3)]
    for key in keys:
        await store.put(key, b"x")
    name = f"{store.url.removeprefix(f's3://{proxy.server.bucket}/')}/d/1"
    partly = (
        f"<DeleteResult><Error><Key>{name}</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    )
    proxy.fault("DeleteObjects", lambda exchange: exchange.reply(faults.Answer(200, {}, partly.encode())))
    with pytest.raises(ExceptionGroup) as failed:
        await store.delete(keys)
    (error,) = failed.value.exceptions
    assert isinstance(error, StorageError)
    assert error.key == "d/1"
    proxy.fault("DeleteObjects", refuse(501, "NotImplemented"))
    await store.delete(keys)
    assert proxy.count("DeleteObject") == 3
    assert await listed(store) == ["warm"]
