"""Retention keeps what it must, deletes what it may, and can be interrupted anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ckptd.checkpoint import leases, retention, survey
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.survey import Survey
from ckptd.checkpoint.verify import verify
from ckptd.errors import AccessDenied, StorageError, Superseded
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
from ckptd.storage import ObjectInfo
from ckptd_backends.wrappers.base import Wrapper
from ckptd_backends.wrappers.faults import Faulty
from tests.checkpoint.builder import (
    State,
    commit,
    keys_of,
    make_checkpoint,
    make_run,
    open_generation,
    retire,
    tensor,
    write_rank,
)


async def test_old_ones_go_with_all_that_is_theirs(run: Run) -> None:
    made = await make_run(run, [10, 20, 30, 40])
    await run.add_mark(made[0], "suspect", by="test", reason="")
    outcome = await retire(run, Keep(last=2), generation=1)
    assert outcome.deleted == made[:2]
    assert not outcome.waiting
    assert not outcome.failed
    assert await run.line() == [made[3], made[2]]
    assert await run.incomplete() == []
    left = [key for key in await keys_of(run.backend) if str(made[0]) in key or str(made[1]) in key]
    assert left == [tombstone_key(version) for version in made[:2]]
    assert (await retire(run, Keep(last=2), generation=1)).deleted == []


async def test_pinned_and_newest_verified_stay(run: Run) -> None:
    made = await make_run(run, [10, 20, 30, 40, 50])
    await run.add_mark(made[0], "pinned", by="me", reason="best")
    await run.add_mark(made[1], "verified", by="me", reason="")
    await run.add_mark(made[2], "verified", by="me", reason="")
    await run.add_mark(made[2], "suspect", by="me", reason="rotten since")
    verdict = (await Survey(run, Keep(last=1)).look()).plan
    assert verdict.keep == {
        made[4]: "one of the last 1",
        made[1]: "the newest that was verified",
        made[0]: "pinned",
    }
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[2], made[3]]
    await run.add_mark(made[0], "unpinned", by="me", reason="")
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_beside_the_line_things_stay_for_a_while(run: Run) -> None:
    first = await make_run(run, [10, 20, 30, 40])
    second = await make_run(run, [15, 25], opened_from=first[0])
    await run.add_mark(first[2], "pinned", by="me", reason="")
    await retire(run, Keep(last=1), generation=2)
    assert await run.committed() == [*first[1:], second[1]]
    await retire(run, Keep(last=1, beside_seconds=0), generation=2)
    assert await run.committed() == [first[2], second[1]]


async def test_the_newest_good_one_stays_though_the_line_has_left_it(run: Run) -> None:
    first = await make_run(run, [10, 20, 30])
    await run.add_mark(first[0], "verified", by="me", reason="")
    second = await make_run(run, [10, 20])
    for version in second:
        await run.add_mark(version, "unhealthy", by="me", reason="")
    await retire(run, Keep(last=1, beside_seconds=0), generation=2)
    assert await run.committed() == [first[0], first[2], second[1]]


async def test_r63_what_was_never_committed_goes_after_a_while(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await make_run(run, [10, 30])
    orphan, unfinished = Version(20, 1), Version(40, 1)
    receipt = await write_rank(run, orphan, State([tensor("w", (3,))]))
    await write_rank(run, unfinished, State([tensor("w", (3,))]))
    assert (await retire(run, Keep(), generation=1)).deleted == []
    monkeypatch.setattr(survey, "ORPHAN_SECONDS", 0.0)
    assert (await retire(run, Keep(), generation=1)).deleted == [orphan]
    assert await run.committed() == made
    assert await run.incomplete() == [unfinished]
    await commit(run, [receipt])  # by somebody who had read the receipt long before
    assert (await retire(run, Keep(), generation=1)).deleted == [orphan]
    assert await run.committed() == made


async def test_an_orphan_that_is_committed_in_time_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await make_run(run, [10, 30])
    late = Version(20, 1)
    receipt = await write_rank(run, late, State([tensor("w", (3,))]))
    monkeypatch.setattr(survey, "ORPHAN_SECONDS", 0.0)

    class Meanwhile(Wrapper):
        async def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
            info = await super().put(key, data, if_absent=if_absent)
            if key == tombstone_key(late):
                await commit(run, [receipt])
            return info

    outcome = await retire(Run(Meanwhile(run.backend), run.id), Keep(), generation=1)
    assert outcome.deleted == []
    assert await run.line() == [made[1], late, made[0]]
    assert (await verify(run, late)).good
    assert await keys_of(run.backend, TOMBSTONES) == []


async def test_who_is_about_to_refer_to_it_keeps_it(run: Run) -> None:
    made = await make_run(run, [10, 20])
    stem = leases.reference_stem(made[0])
    lease = await leases.take(run.backend, stem, purpose="reference", holder="node3", version=made[0])
    assert list((await retire(run, Keep(last=1), generation=1)).waiting) == [made[0]]
    await lease.release()
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_the_best_by_what_the_training_said(run: Run) -> None:
    generation = await open_generation(run)
    losses = {10: 0.5, 20: None, 30: 0.25, 40: 0.75}  # none: it was not finite
    for step, loss in losses.items():
        await make_checkpoint(run, Version(step, generation), metrics={"loss": loss})
    outcome = await retire(run, Keep(last=1, best=("loss", "min", 1)), generation=1)
    assert outcome.deleted == [Version(10, 1), Version(20, 1)]


async def test_only_the_newest_generation_deletes(run: Run) -> None:
    made = await make_run(run, [10, 20, 30])
    await open_generation(run, opened_from=made[2])
    with pytest.raises(Superseded, match="generation 2 exists"):
        await retire(run, Keep(last=1), generation=1)
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
            outcome = await retire(Run(faulty, run.id), Keep(last=1), generation=generation)
            assert outcome.failed or faulty.calls < fail_at or outcome.deleted == made[:2]
        except StorageError:
            pytest.fail("a failure to delete is reported, never raised")
        assert (await verify(fresh, made[2])).good
        for version in made[:2]:  # what is half deleted does not exist, what exists is whole
            if version in await fresh.committed():
                assert (await verify(fresh, version)).good
        again = await retire(fresh, Keep(last=1), generation=generation)
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
    outcome = await retire(Run(Stubborn(run.backend), run.id), Keep(last=1), generation=1)
    assert outcome.deleted == [made[1]]
    assert list(outcome.failed) == [made[0]]
    assert "no" in outcome.failed[made[0]]
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_a_deletion_that_is_no_longer_wanted_is_called_off(run: Run) -> None:
    made = await make_run(run, [10, 20])
    await run.backend.put(tombstone_key(made[0]), encode(Tombstone(reason="old", version=str(made[0]))))
    await run.add_mark(made[0], "pinned", by="me", reason="wait")
    outcome = await retire(run, Keep(last=1), generation=1)
    assert outcome.deleted == []
    assert await keys_of(run.backend, TOMBSTONES) == []
    assert await run.committed() == made


async def test_what_is_read_waits(run: Run) -> None:
    made = await make_run(run, [10, 20])
    async with await CheckpointReader.open(run, made[0], holder="node3") as reader:
        outcome = await retire(run, Keep(last=1), generation=1)
        assert outcome.deleted == []
        assert outcome.waiting == {made[0]: "10-g1 is read by node3"}
        await reader.check_shard(0)
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[0]]


async def test_a_tombstone_outlives_every_late_committer_and_then_goes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await make_run(run, [10, 20])
    key = manifest_key(made[0])
    manifest = await run.backend.get(key, limit_bytes=1 << 20)
    assert (await retire(run, Keep(last=1), generation=1)).deleted == [made[0]]
    await run.backend.put(key, manifest)  # by a daemon that had all receipts before
    again = await retire(run, Keep(last=1), generation=1)
    assert again.deleted == [made[0]]
    assert await run.committed() == [made[1]]
    assert await keys_of(run.backend, TOMBSTONES) == [tombstone_key(made[0])]
    await run.add_mark(made[0], "suspect", by="somebody late", reason="")
    monkeypatch.setattr(retention, "TOMBSTONE_SECONDS", 0.0)
    await make_checkpoint(run, Version(30, 1))  # by whose time it has expired
    await retire(run, Keep(last=2), generation=1)
    assert await keys_of(run.backend, TOMBSTONES) == []
    assert await keys_of(run.backend, MARKS) == []
