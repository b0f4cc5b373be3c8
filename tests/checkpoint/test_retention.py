"""Retention keeps what it must, deletes what it may, and can be interrupted anywhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint import retention
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.retention import Keep, current_plan, plan
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import verify
from ckptd.errors import AccessDenied, ConfigError, StorageError, Superseded
from ckptd.format.keys import (
    MARKS,
    TOMBSTONES,
    Version,
    checkpoint_prefix,
    manifest_key,
    parse_version,
    tombstone_key,
)
from ckptd.format.records import Tombstone, encode
from ckptd_backends.wrappers.base import Wrapper
from ckptd_backends.wrappers.faults import Faulty
from tests.checkpoint.builder import State, keys_of, make_checkpoint, make_run, open_generation, tensor

versions = st.lists(st.builds(Version, st.integers(0, 50), st.integers(1, 3)), unique=True, max_size=12).map(
    lambda found: sorted(found, key=lambda v: (v.generation, v.step), reverse=True)
)


@given(versions, st.integers(1, 8), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_plan(line: list[Version], last: int, verified: set[int], pinned: set[int]) -> None:
    marked = [{line[i] for i in places if i < len(line)} for places in (verified, pinned)]
    verdict = plan(Keep(last=last), line, verified=marked[0], pinned=marked[1])
    assert verdict.keep.keys() | verdict.delete.keys() == set(line)
    assert not verdict.keep.keys() & verdict.delete.keys()
    assert verdict.keep.keys() >= {*line[:last], *marked[1], *[v for v in line if v in marked[0]][:1]}
    assert len(verdict.keep) <= last + len(marked[1]) + 1
    assert all({**verdict.keep, **verdict.delete}.values())


@pytest.mark.parametrize("last", [0, -1])
def test_keep_keeps_at_least_one(last: int) -> None:
    with pytest.raises(ConfigError):
        Keep(last=last)


async def test_old_ones_go_with_all_that_is_theirs(run: Run) -> None:
    made = await make_run(run, [10, 20, 30, 40])
    await run.add_mark(made[0], "suspect", by="test", reason="")
    outcome = await retention.apply(run, Keep(last=2), generation=1)
    assert outcome.deleted == made[:2]
    assert not outcome.waiting
    assert not outcome.failed
    assert await run.line() == [made[3], made[2]]
    assert await run.incomplete() == []
    left = [key for key in await keys_of(run.backend) if str(made[0]) in key or str(made[1]) in key]
    assert left == [tombstone_key(version) for version in made[:2]]
    assert (await retention.apply(run, Keep(last=2), generation=1)).deleted == []


async def test_pinned_and_newest_verified_stay(run: Run) -> None:
    made = await make_run(run, [10, 20, 30, 40, 50])
    await run.add_mark(made[0], "pinned", by="me", reason="best")
    await run.add_mark(made[1], "verified", by="me", reason="")
    await run.add_mark(made[2], "verified", by="me", reason="")
    await run.add_mark(made[2], "suspect", by="me", reason="rotten since")
    verdict = await current_plan(run, Keep(last=1))
    assert verdict.keep == {
        made[4]: "one of the last 1",
        made[1]: "the newest that was verified",
        made[0]: "pinned",
    }
    assert (await retention.apply(run, Keep(last=1), generation=1)).deleted == [made[2], made[3]]
    await run.add_mark(made[0], "unpinned", by="me", reason="")
    assert (await retention.apply(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_beside_the_line_nothing_is_touched(run: Run) -> None:
    first = await make_run(run, [10, 20, 30])
    second = await make_run(run, [15, 25], opened_from=first[0])
    await retention.apply(run, Keep(last=1), generation=2)
    assert await run.committed() == [first[1], first[2], second[1]]


async def test_only_the_newest_generation_deletes(run: Run) -> None:
    made = await make_run(run, [10, 20, 30])
    await open_generation(run, opened_from=made[2])
    with pytest.raises(Superseded, match="generation 2 exists"):
        await retention.apply(run, Keep(last=1), generation=1)
    assert await run.committed() == made
    assert await keys_of(run.backend, TOMBSTONES) == []


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_pass_that_breaks_off_anywhere_is_finished_by_the_next(run: Run, when: str) -> None:
    for fail_at in range(1, 50):
        fresh = Run(run.backend, run.id)
        generation = await open_generation(fresh)
        made = [Version(step, generation) for step in (10, 20, 30)]
        for version in made:
            await make_checkpoint(fresh, version, State([tensor("w", (3,))]))
            await fresh.add_mark(version, "suspect", by="test", reason="")
        faulty = Faulty(fresh.backend, fail_at=fail_at, when="before" if when == "before" else "after")
        try:
            outcome = await retention.apply(Run(faulty, run.id), Keep(last=1), generation=generation)
            assert outcome.failed or faulty.calls < fail_at or outcome.deleted == made[:2]
        except StorageError:
            pytest.fail("a failure to delete is reported, never raised")
        assert (await verify(fresh, made[2])).good
        for version in made[:2]:  # what is half deleted does not exist, what exists is whole
            if version in await fresh.committed():
                assert (await verify(fresh, version)).good
        again = await retention.apply(fresh, Keep(last=1), generation=generation)
        assert not again.failed
        assert await fresh.line() == [made[2]]
        assert set(made[:2]) <= {
            parse_version(k[len(TOMBSTONES) :][:20]) for k in await keys_of(fresh.backend, TOMBSTONES)
        }
        for version in made[:2]:
            assert await keys_of(fresh.backend, checkpoint_prefix(version)) == []
            assert await keys_of(fresh.backend, f"{MARKS}{version}/") == []
        if faulty.calls < fail_at:
            return
    pytest.fail("the pass never ended without a fault")


async def test_failures_are_collected_and_others_go_on(run: Run) -> None:
    class Stubborn(Wrapper):
        async def delete(self, keys: Iterable[str]) -> None:
            wanted = list(keys)
            if any("000000000010" in key for key in wanted):
                raise ExceptionGroup("delete", [AccessDenied("no", key=wanted[0])])
            await super().delete(wanted)

    made = await make_run(run, [10, 20, 30])
    outcome = await retention.apply(Run(Stubborn(run.backend), run.id), Keep(last=1), generation=1)
    assert outcome.deleted == [made[1]]
    assert list(outcome.failed) == [made[0]]
    assert "no" in outcome.failed[made[0]]
    assert (await retention.apply(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_a_deletion_that_is_no_longer_wanted_is_called_off(run: Run) -> None:
    made = await make_run(run, [10, 20])
    await run.backend.put(tombstone_key(made[0]), encode(Tombstone(reason="old", version=str(made[0]))))
    await run.add_mark(made[0], "pinned", by="me", reason="wait")
    outcome = await retention.apply(run, Keep(last=1), generation=1)
    assert outcome.deleted == []
    assert await keys_of(run.backend, TOMBSTONES) == []
    assert await run.committed() == made


async def test_what_is_read_waits(run: Run) -> None:
    made = await make_run(run, [10, 20])
    async with await CheckpointReader.open(run, made[0], holder="node3") as reader:
        outcome = await retention.apply(run, Keep(last=1), generation=1)
        assert outcome.deleted == []
        assert outcome.waiting == {made[0]: "10-g1 is read by node3"}
        await reader.check_shard(0)
    assert (await retention.apply(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_a_tombstone_outlives_every_late_committer_and_then_goes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await make_run(run, [10, 20])
    key = manifest_key(made[0])
    manifest = await run.backend.get(key, limit_bytes=1 << 20)
    assert (await retention.apply(run, Keep(last=1), generation=1)).deleted == [made[0]]
    await run.backend.put(key, manifest)  # by a daemon that had all receipts before
    again = await retention.apply(run, Keep(last=1), generation=1)
    assert again.deleted == [made[0]]
    assert await run.committed() == [made[1]]
    assert await keys_of(run.backend, TOMBSTONES) == [tombstone_key(made[0])]
    await run.add_mark(made[0], "suspect", by="somebody late", reason="")
    monkeypatch.setattr(retention, "TOMBSTONE_SECONDS", 0.0)
    await make_checkpoint(run, Version(30, 1))  # by whose time it has expired
    await retention.apply(run, Keep(last=2), generation=1)
    assert await keys_of(run.backend, TOMBSTONES) == []
    assert await keys_of(run.backend, MARKS) == []
