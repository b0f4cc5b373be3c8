"""A run in several tiers: one id, one number for each generation, one line."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.tiers import TierRuns, copy_identity, open_generation, open_tiers, put_generation
from ckptd.errors import ConfigError, IntegrityError, NoCheckpoint, Superseded, Unavailable
from ckptd.format.keys import RUN, Version, generation_key, manifest_key
from ckptd.format.records import GenerationRecord
from ckptd.storage import Backend
from ckptd_backends.memory import MemoryBackend
from ckptd_backends.wrappers.base import Wrapper


class Down(Wrapper):
    """A store that answers nothing. What a real one does then is tested with a real one, of the client."""

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        raise Unavailable("down", key=key)


@pytest.fixture
def backends() -> list[Backend]:
    unique = uuid.uuid4().hex
    return [MemoryBackend(f"memory://{name}-{unique}") for name in ("near", "middle", "far")]


async def begin(tiers: TierRuns, launch: str = "launch#0", opened_from: Version | None = None) -> GenerationRecord:
    return await open_generation(tiers, launch=launch, world=1, opened_from=opened_from, host="host", pid=1)


async def test_all_tiers_get_one_id_and_what_was_half_made_is_completed(backends: list[Backend]) -> None:
    with pytest.raises(NoCheckpoint):
        await open_tiers(backends)
    alone = (await open_tiers(backends[2:], create=True)).id  # somebody died over it
    tiers = await open_tiers(backends, create=True)
    assert tiers.id == alone
    assert {(await Run.open(backend)).id for backend in backends} == {alone}


async def test_of_two_that_create_at_once_the_first_in_the_furthest_wins(backends: list[Backend]) -> None:
    both = await asyncio.gather(*(open_tiers(backends, create=True) for _ in range(8)))
    assert len({tiers.id for tiers in both}) == 1


async def test_tiers_of_different_runs_are_refused(backends: list[Backend]) -> None:
    for backend in backends[:2]:
        await open_tiers([backend], create=True)
    with pytest.raises(ConfigError, match="different runs"):
        await open_tiers(backends, create=True)


async def test_a_tier_that_cannot_tell_is_passed_over_only_where_another_knows(backends: list[Backend]) -> None:
    near, middle, far = backends
    with pytest.raises(Unavailable):
        await open_tiers([near, Down(far)], create=True)
    await open_tiers([near], create=True)
    tiers = await open_tiers([near, middle, Down(far)], create=True)
    assert list(tiers.silent) == [far.url]
    assert [run.backend.url for run in tiers.runs] == [near.url, middle.url]
    assert not await tiers.latest_is_ours("launch#1")
    await begin(tiers)
    assert await tiers.latest_is_ours("launch#1")
    assert not await tiers.latest_is_ours("other#0")


async def test_a_generation_gets_a_number_that_is_free_in_all_tiers(backends: list[Backend]) -> None:
    far = await open_tiers(backends[2:], create=True)
    for _ in range(3):
        await begin(far)
    tiers = await open_tiers(backends, create=True)
    assert (await begin(tiers)).generation == 4
    records = {await backend.get(generation_key(4), limit_bytes=10_000) for backend in backends}
    assert len(records) == 1


async def test_a_tier_that_was_down_tells_that_another_launch_took_the_number(backends: list[Backend]) -> None:
    near, _, far = backends
    await open_tiers([near, far], create=True)
    ours = await begin(await open_tiers([near]))
    await begin(await open_tiers([far]), launch="theirs#0")
    with pytest.raises(Superseded, match="launch theirs#0"):
        await put_generation(far, ours)
    run = await Run.open(near)
    with pytest.raises(Superseded):
        await copy_identity(run, far, 1)


async def test_the_line_goes_over_all_tiers(backends: list[Backend]) -> None:
    near, middle, far = backends
    tiers = await open_tiers(backends, create=True)
    await begin(tiers)
    await far.put(manifest_key(Version(10, 1)), b"{}")
    await far.put(manifest_key(Version(20, 1)), b"{}")
    await near.delete([generation_key(1)])  # a new disk
    await begin(tiers, opened_from=Version(10, 1))
    await near.put(manifest_key(Version(15, 2)), b"{}")
    await middle.put(manifest_key(Version(12, 2)), b"{}")
    assert await tiers.line() == [Version(15, 2), Version(12, 2), Version(10, 1)]
    assert await tiers.committed() == {Version(15, 2), Version(12, 2), Version(10, 1), Version(20, 1)}


async def test_a_lost_run_record_beside_checkpoints_is_not_replaced(backends: list[Backend]) -> None:
    near, _, far = backends
    await open_tiers([near, far], create=True)
    await near.put(manifest_key(Version(1, 1)), b"{}")
    await near.delete([RUN])
    tiers = await open_tiers([near, far], create=True)
    assert isinstance(tiers.silent[near.url], IntegrityError)
    with pytest.raises(IntegrityError):
        await Run.open(near)
