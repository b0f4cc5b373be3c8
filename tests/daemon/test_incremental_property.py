"""Whatever is saved, changed, pruned, killed and gone on with by another number of ranks: what is committed is whole.

Everything is the daemon's own code, on a store in memory; only the slots are missing. A daemon is killed at any of its
writes, between the choice of what to refer to and the manifest too.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.tensors import find_tensor, read_region
from ckptd.checkpoint.unchanged import Described
from ckptd.checkpoint.verify import verify
from ckptd.daemon.bases import Bases, Referred, refer
from ckptd.daemon.commit import Commit, Patience
from ckptd.daemon.tier import Checkpoint
from ckptd.errors import SaveError
from ckptd.format.keys import Version
from ckptd.format.records import Box, Receipt, Reference, Snapshot, decode
from ckptd.storage import open_backend
from tests.checkpoint.builder import Held, State, chunk, open_generation, retire, write_rank
from tests.checkpoint.mortal import Killed, Mortal

NAMES = "abcd"
ROWS, ROW_BYTES = 6, 2048
"""Cut by rows over the ranks; together more than a header."""
T = TypeVar("T")


def value(name: str, salt: int) -> bytes:
    return bytes((ord(name) + 7 * salt + i) % 251 for i in range(ROW_BYTES)) * ROWS


class Incremental(RuleBasedStateMachine):
    """A run, and what each of its checkpoints must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.run = self.do(Run.open(open_backend(f"memory://{uuid.uuid4().hex}"), create=True))
        self.world = 1
        self.generation = self.do(open_generation(self.run))
        self.parent: Version | None = None
        self.step = 0
        self.bases = Bases()
        self.state = dict.fromkeys(NAMES, 0)
        self.saved: dict[Version, dict[str, int]] = {}
        """What was asked to be saved; it may never have been committed."""
        self.in_flight: list[tuple[Version, int, dict[int, bytes], list[Referred]]] = []
        self.referred_bytes = 0

    def teardown(self) -> None:
        for *_, referred in self.in_flight:
            for one in referred:
                self.do(one.release())
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    # Saving

    def rank_state(self, rank: int) -> State:
        start, length = chunk(ROWS, rank, self.world)
        held: list[Held] = []
        for name in NAMES:
            data = value(name, self.state[name])[start * ROW_BYTES : (start + length) * ROW_BYTES]
            held.append(Held(name, (ROWS, ROW_BYTES), data, dtype="uint8", box=Box((start, 0), (length, ROW_BYTES))))
        return State(held, {})

    async def write(self, run: Run, version: Version, referred: list[Referred]) -> dict[int, bytes]:
        async def choose(snapshot: Snapshot, described: Described) -> Sequence[Reference]:
            base = await self.bases.find(run.backend, snapshot)
            if base is None:
                return ()
            referred.append(await refer(run.backend, base, described))
            return referred[-1].references

        return {
            rank: await write_rank(
                run,
                version,
                self.rank_state(rank),
                rank=rank,
                world=self.world,
                parent=self.parent,
                refer=choose,
            )
            for rank in range(self.world)
        }

    async def commit(self, run: Run, version: Version, world: int, receipts: dict[int, bytes]) -> None:
        checkpoint = Checkpoint(run.backend, version, world, run.id)
        commit = Commit(checkpoint, Patience(30, 30), lambda rank: None, resumed=False)
        for rank, receipt in receipts.items():
            commit.join(rank, receipt)
        await commit.run()
        for receipt in receipts.values():
            snapshot = decode(decode(receipt, Receipt).snapshot, Snapshot)
            self.bases.committed(run.backend.url, snapshot, receipt, likely=True)
            self.referred_bytes += sum(e.bytes for r in decode(receipt, Receipt).shard.references for e in r.extents)

    def begin(self, changed: set[str]) -> Version:
        self.step += 1
        for name in changed:
            self.state[name] += 1
        version = Version(self.step, self.generation)
        self.saved[version] = dict(self.state)
        return version

    @rule(changed=st.sets(st.sampled_from(NAMES), max_size=3))
    def save(self, changed: set[str]) -> None:
        version, referred = self.begin(changed), list[Referred]()

        async def save() -> None:
            receipts = await self.write(self.run, version, referred)
            await self.commit(self.run, version, self.world, receipts)
            for one in referred:
                await one.release()

        self.do(save())
        assert version in self.do(self.run.committed())

    @rule(changed=st.sets(st.sampled_from(NAMES), max_size=2))
    def save_and_wait_for_others(self, changed: set[str]) -> None:
        """The receipts are there; the commit comes later, or never."""
        version, referred = self.begin(changed), list[Referred]()
        receipts = self.do(self.write(self.run, version, referred))
        self.in_flight.append((version, self.world, receipts, referred))

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit_late(self) -> None:
        version, world, receipts, referred = self.in_flight.pop(0)

        async def commit() -> None:
            try:
                await self.commit(self.run, version, world, receipts)
            finally:
                for one in referred:
                    await one.release()

        self.do(commit())  # held all the time, so nothing can have gone
        self.check()

    @precondition(lambda self: self.in_flight)
    @rule()
    def lose_the_holder_and_commit_later(self) -> None:
        """The daemon that chose is gone, and its leases with it; another one has only the receipts."""
        version, world, receipts, referred = self.in_flight.pop()
        for one in referred:
            self.do(one.release())
        self.do(retire(self.run, Keep(last=1, beside_seconds=0), generation=self.generation))
        with contextlib.suppress(SaveError):  # what it needs may have gone: then it must not be committed
            self.do(self.commit(self.run, version, world, receipts))
        self.check()

    @rule(changed=st.sets(st.sampled_from(NAMES), max_size=2), at=st.integers(1, 12), after=st.booleans())
    def save_and_die(self, changed: set[str], at: int, after: bool) -> None:
        version, referred = self.begin(changed), list[Referred]()
        mortal = Run(Mortal(self.run.backend, at, after=after), self.run.id)

        async def save() -> None:
            try:
                await self.commit(mortal, version, self.world, await self.write(mortal, version, referred))
            except Killed:
                pass
            finally:
                for one in referred:
                    with contextlib.suppress(Killed):
                        await one.release()

        self.do(save())
        self.bases = Bases()  # the next daemon knows nothing
        self.check()

    @rule(world=st.integers(1, 3), back=st.integers(0, 2))
    def go_on_with(self, world: int, back: int) -> None:
        line = self.do(self.run.line())
        self.parent = line[min(back, len(line) - 1)] if line else None
        if self.parent is not None:
            self.state = dict(self.saved[self.parent])
            self.step = self.parent.step
        self.world = world
        self.generation = self.do(open_generation(self.run, world=world, opened_from=self.parent))

    # What may break it

    @rule(last=st.integers(1, 3), at=st.none() | st.integers(1, 12), after=st.booleans())
    def prune(self, last: int, at: int | None, after: bool) -> None:
        run = self.run if at is None else Run(Mortal(self.run.backend, at, after=after), self.run.id)
        with contextlib.suppress(Killed):
            outcome = self.do(retire(run, Keep(last=last, beside_seconds=0), generation=self.generation))
            assert not outcome.failed
        self.check()

    @rule()
    def look(self) -> None:
        self.check()

    def check(self) -> None:
        self.do(self._check())

    async def _check(self) -> None:
        committed = set(await self.run.committed())
        for version in committed:
            found = await verify(self.run, version)
            assert found.good, found.reason
            async with await CheckpointReader.open(self.run, version) as reader:
                needed = {*reader.manifest.references}
                assert needed <= {str(other) for other in committed}
                for name, salt in self.saved[version].items():
                    tensor = await find_tensor(reader, name, None)
                    assert tensor is not None
                    out = bytearray(tensor.size_bytes)
                    await read_region(reader, tensor, region(tensor.shape), memoryview(out))
                    assert out == value(name, salt), (version, name)


class TestIncremental(Incremental.TestCase):
    """Runs it."""

    settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
