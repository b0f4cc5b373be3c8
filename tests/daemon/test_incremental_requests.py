"""How often an incremental save asks the store: a save of every few steps is to cost no more for a long history."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.checkpoint.run import Run
from ckptd.daemon.bases import Bases, Referred, refer
from ckptd.daemon.commit import Commit, Patience
from ckptd.daemon.source import Blocks
from ckptd.daemon.tier import Checkpoint
from ckptd.daemon.upload import Contents, upload
from ckptd.format import records
from ckptd.format.cover import check_layout
from ckptd.format.keys import RUN as RUN_KEY
from ckptd.format.keys import Version
from ckptd.format.records import Receipt, Reference, Snapshot, decode, decode_layout, encode
from ckptd.format.shard import block_bounds
from ckptd.limits import BLOCK_BYTES_WRITTEN
from ckptd.storage import open_backend
from ckptd_backends.wrappers import Traced
from tests.daemon.member import RUN, Content, Member
from tests.daemon.test_incremental import Parts, content, parts_of
from tests.power.life import Snapshotted


class Slot(Snapshotted):
    """A sealed slot, whose bytes may be compared."""

    async def copy(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        for start, out in parts:
            out[:] = self.view[start : start + len(out)]


@dataclass
class Saving:
    """A daemon's save of a rank, without slots and messages."""

    store: Traced
    bases: Bases

    async def save(self, step: int, parts: Parts) -> tuple[Version, dict[str, int]]:
        """A committed checkpoint, and how often the store was asked for what."""
        found = content(Member(self.store.url), step, parts)
        contents = _contents(found)
        before = {name: count.calls for name, count in self.store.counts.items()}
        base, referred = await self.bases.find(self.store, contents.snapshot), Referred()
        slot = Slot(found.shard, contents.blocks)

        async def choose() -> Sequence[Reference]:
            nonlocal referred
            if base is not None:
                referred = await refer(self.store, base, contents.described(slot.blocks))
            return referred.references

        owner = cast(Any, SimpleNamespace(dead=False, connected=True))
        receipt = (await upload(self.store, contents, cast(Any, slot), owner, choose)).receipt
        commit = Commit(
            Checkpoint(self.store, found.version, 1, RUN), Patience(30, 30), lambda rank: None, resumed=False
        )
        commit.join(0, receipt)
        await commit.run()
        await referred.release()
        self.bases.committed(self.store.url, contents.snapshot, receipt, likely=True)
        assert bool(decode(receipt, Receipt).shard.references) == bool(referred.references)
        asked = {name: count.calls - before.get(name, 0) for name, count in self.store.counts.items()}
        return found.version, {name: calls for name, calls in asked.items() if calls}


def _contents(found: Content) -> Contents:
    snapshot = decode(found.doc, Snapshot)
    layout = decode_layout(snapshot.layout)
    sizes = [piece.bytes for piece in check_layout(layout)]
    blocks = Blocks.of(block_bounds(layout.header_bytes, sizes, BLOCK_BYTES_WRITTEN))
    return Contents(found.doc, snapshot, layout.header_bytes, blocks)


@pytest.fixture
async def saving() -> AsyncIterator[Saving]:
    async with aclosing(Traced(open_backend(f"memory://{uuid.uuid4().hex}"))) as store:
        await store.put(RUN_KEY, encode(records.Run(run=RUN)))
        yield Saving(store, Bases())


IN_FULL = {"get": 3, "put": 3, "head": 1}
"""``run.json`` before the shard and before the manifest, and the next generation; shard, receipt and manifest; the
tombstone."""
FOR_REFERENCES = {
    "put": 2,  # a lease by who chooses, and one by who commits
    "head": 2 * 2 + 1,  # for each its tombstone and its manifest; and the shard
    "delete": 2,  # the leases
}
"""For each checkpoint that is referred to."""


def _sum(*counts: dict[str, int]) -> dict[str, int]:
    return {name: sum(one.get(name, 0) for one in counts) for name in {name for one in counts for name in one}}


async def test_a_save_asks_for_what_it_needs_and_once(saving: Saving) -> None:
    first, asked = await saving.save(1, parts_of(1))
    assert asked == _sum(IN_FULL, {"scan": 1})  # whether there is something to compare with
    _, asked = await saving.save(2, parts_of(2))
    assert asked == _sum(IN_FULL, FOR_REFERENCES, {"scan": 1})  # the marks of the first checkpoint
    _, asked = await saving.save(3, parts_of(3))
    expected = _sum(IN_FULL, FOR_REFERENCES, {"scan": 2})  # those of the second, and of the first, which has the bytes
    assert asked == expected
    run = Run(saving.store.inner, RUN)
    for step in range(100, 130):  # a long history
        await run.add_mark(Version(step, 1), "verified", by="test", reason="")
    fourth, asked = await saving.save(4, parts_of(4))
    assert asked == expected
    await run.add_mark(first, "suspect", by="test", reason="it rots")
    _, asked = await saving.save(5, parts_of(5))
    assert asked == _sum(IN_FULL, {"scan": 2})
    await run.add_mark(fourth, "verified", by="test", reason="")


async def test_where_nothing_is_unchanged_marks_are_not_asked_for(saving: Saving) -> None:
    for step in (1, 2):
        _, asked = await saving.save(step, {"all of it": bytes([step]) * 1_000_000})
    assert asked == IN_FULL
