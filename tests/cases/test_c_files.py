"""Family (c): partial writes, names, retention."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import newest_good, verify
from ckptd.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    CoverageError,
    IntegrityError,
    NoCheckpoint,
    StorageError,
    Unavailable,
)
from ckptd.format.keys import Version, manifest_key, shard_key
from ckptd.storage import Backend, ObjectInfo, open_backend
from ckptd_backends.wrappers.base import Wrapper
from ckptd_backends.wrappers.faults import Faulty, Slow
from ckptd_client import open_checkpoint
from devtools.processes import free_ports
from devtools.seaweedfs import S3Endpoint
from tests.checkpoint.builder import (
    State,
    commit,
    keys_of,
    make_run,
    open_generation,
    retire,
    small_state,
    tensor,
    write_rank,
)


class _NoListing(Wrapper):
    """A store whose listings fail."""

    def __init__(self, inner: Backend, error: type[StorageError]) -> None:
        super().__init__(inner)
        self.error = error

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        raise self.error("no")
        yield


@pytest.fixture
def backend() -> Backend:
    """An empty store."""
    return open_backend(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
async def run(backend: Backend) -> Run:
    """A run without checkpoints."""
    return await Run.open(backend, create=True)


def _states(world: int) -> list[State]:
    return [State([tensor(f"m/t{rank}", (50,), salt=rank)]) for rank in range(world)]


# R62: what is incomplete is not a checkpoint


async def test_r62_the_highest_number_without_a_manifest_is_never_used(run: Run) -> None:
    (good,) = await make_run(run, [10])
    for rank in range(2):  # half of a world of four
        await write_rank(run, Version(900, 1), _states(4)[rank], rank=rank, world=4)
    await run.backend.put("checkpoints/step_000950/model.pt", b"of somebody else")
    assert await run.resolve("latest") == good
    assert (await newest_good(run)).version == good
    assert await run.incomplete() == [Version(900, 1)]
    with pytest.raises(NoCheckpoint):
        await run.resolve(900)


# R63: leftovers of a failed write


async def test_r63_leftovers_of_a_failed_write_are_never_read(run: Run) -> None:
    (good,) = await make_run(run, [10])
    version, states = Version(20, await open_generation(run, world=4)), _states(4)
    receipts = [await write_rank(run, version, states[rank], rank=rank, world=4) for rank in (0, 1, 3)]
    await run.backend.put(shard_key(version, 2, 4, "empty"), b"")
    await run.backend.put(shard_key(version, 2, 4, "other"), await _shard_of(run, good))
    with pytest.raises(CoverageError):
        await commit(run, receipts)
    assert await run.latest() == good
    # A later attempt of rank 2 commits, and its leftovers beside it stay unread.
    receipts.insert(2, await write_rank(run, version, states[2], rank=2, world=4))
    await commit(run, receipts)
    assert (await verify(run, version)).good


async def _shard_of(run: Run, version: Version) -> bytes:
    async with await CheckpointReader.open(run, version) as reader:
        receipt, _, _ = await reader.receipt(0)
    return await run.backend.get(receipt.shard.key, limit_bytes=1 << 30)


@pytest.mark.parametrize("size", [0, 1, 100_000])
async def test_r63_a_shard_that_became_short_is_noticed(run: Run, size: int) -> None:
    (version,) = await make_run(run, [10])
    async with await CheckpointReader.open(run, version) as reader:
        key = (await reader.receipt(0)).receipt.shard.key
        data = await run.backend.get(key, limit_bytes=1 << 30)
        await run.backend.put(key, data[:size])
        with pytest.raises(IntegrityError, match=f"ends early.*promises {len(data)} bytes"):
            await reader.check_shard(0)


# R64: what exists is asked of the storage


async def test_r64_a_failed_save_is_in_no_list_and_its_step_can_be_saved_again(run: Run) -> None:
    made = await make_run(run, [10])
    await write_rank(run, Version(20, 1), small_state())  # its commit never came
    assert await run.latest() == made[0]
    again = await make_run(run, [15, 20], opened_from=made[0])
    assert await run.line() == [again[1], again[0], made[0]]
    assert (await verify(run, await run.resolve(20))).good
    assert await run.resolve(20) == Version(20, 2)


# R65: each attempt has its own names


async def test_r65_a_second_attempt_never_touches_the_first(run: Run) -> None:
    version = Version(5, await open_generation(run))
    await commit(run, [await write_rank(run, version, small_state(1), attempt="first")])
    before = {key: await run.backend.get(key, limit_bytes=1 << 30) for key in await keys_of(run.backend)}
    with pytest.raises(AlreadyExists):  # the same step again, killed before and after its shard
        await write_rank(run, version, small_state(2), attempt="second")
    after = {key: await run.backend.get(key, limit_bytes=1 << 30) for key in before}
    assert before == after
    assert (await verify(run, version)).good
    async with await CheckpointReader.open(run, version) as reader:
        assert (await reader.receipt(0)).receipt.shard.attempt == "first"


# R67: deletion follows a commit


async def test_r67_an_unfinished_newer_one_does_not_cost_the_last_good_one(run: Run) -> None:
    (good,) = await make_run(run, [10])
    receipt = await write_rank(run, Version(20, 1), small_state())  # uploaded, not committed
    assert (await retire(run, Keep(last=1), generation=1)).deleted == []
    assert (await verify(run, good)).good
    await commit(run, [receipt])
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [good]
    assert (await newest_good(run)).version == Version(20, 1)


# R71: a new start in an old place


async def test_r71_a_low_step_of_a_new_start_is_not_the_oldest(run: Run) -> None:
    old = await make_run(run, [500, 600, 700])
    new = await make_run(run, [100])
    outcome = await retire(run, Keep(last=3), generation=2)
    assert outcome.deleted == []
    assert await run.line() == new
    assert await run.committed() == [*old, *new]


# R76: what is read is not deleted


@pytest.mark.parametrize("root", ["memory", "file"])
async def test_r76_a_slow_reader_finishes_before_its_checkpoint_goes(tmp_run: str, root: str) -> None:
    backend = open_backend(tmp_run if root == "file" else f"memory://{uuid.uuid4().hex}")
    run = await Run.open(backend, create=True)
    made = await make_run(run, [10, 20])
    slow = Run(Slow(backend, delay_seconds=0.1), run.id)
    async with await CheckpointReader.open(slow, made[0], holder="slow reader") as reader:
        reading = asyncio.create_task(reader.check_shard(0))
        outcome = await retire(run, Keep(last=1), generation=1)
        assert list(outcome.waiting) == [made[0]]
        await reading
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[0]]
    await backend.aclose()


async def test_r76_a_reader_that_comes_too_late_takes_another(run: Run) -> None:
    made = await make_run(run, [10, 20])
    halfway = Faulty(run.backend, fail_at=4)  # announced, the store asked for the time, and the manifest about to go
    outcome = await retire(Run(halfway, run.id), Keep(last=1), generation=1)
    assert list(outcome.failed) == [made[0]]
    assert manifest_key(made[0]) in await keys_of(run.backend)
    with pytest.raises(NoCheckpoint, match="being deleted"):
        await CheckpointReader.open(run, made[0], holder="late")
    async with await CheckpointReader.open(run, made[1], holder="late") as reader:
        await reader.check_shard(0)


# R83: none exists, and cannot tell


def test_r83_nothing_there_is_told_from_cannot_tell(tmp_run: str, s3_server: S3Endpoint) -> None:
    for url, options in ((tmp_run, {}), (s3_server.prefix(), s3_server.options)):
        with pytest.raises(NoCheckpoint):
            open_checkpoint(url, storage_options=options)
    with pytest.raises(AccessDenied):
        open_checkpoint(s3_server.prefix(), storage_options={**s3_server.options, "secret_access_key": "wrong"})
    with pytest.raises(ConfigError, match=r"the bucket does not exist: .*no-such-bucket-at-all"):
        open_checkpoint("s3://no-such-bucket-at-all/run", storage_options=s3_server.options)


async def test_r83_a_store_that_does_not_answer_is_unavailable() -> None:
    options = {"endpoint_url": f"http://127.0.0.1:{free_ports(1)[0]}", "access_key_id": "a", "secret_access_key": "b"}
    options |= {"region": "us-east-1"}
    backend = open_backend("s3://bucket/run", options)
    try:
        for create in (False, True):
            with pytest.raises(Unavailable):
                await Run.open(backend, create=create)
    finally:
        await backend.aclose()


@pytest.mark.parametrize("error", [AccessDenied, Unavailable])
async def test_r83_a_listing_that_fails_is_not_an_empty_one(run: Run, error: type[StorageError]) -> None:
    await make_run(run, [10])
    refused = Run(_NoListing(run.backend, error), run.id)
    for question in (refused.latest, refused.line, refused.committed):
        with pytest.raises(error):
            await question()
    with pytest.raises(error):
        await refused.resolve("latest")
