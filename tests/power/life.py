"""Lives of a run on a disk that loses power: the real store, the real commit and the real retention, in the order in
which daemons do things, and nothing else of them."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from ckptd.checkpoint import retention
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import verify
from ckptd.daemon.commit import Patience
from ckptd.daemon.commits import Commits
from ckptd.daemon.source import Blocks
from ckptd.daemon.tier import Checkpoint
from ckptd.daemon.upload import Contents, existing_receipt, upload
from ckptd.errors import AlreadyExists, SaveSkipped, Superseded
from ckptd.format import keys, records
from ckptd.format.cover import check_layout
from ckptd.format.digests import digest_blocks
from ckptd.format.keys import Version
from ckptd.format.records import Parent, Snapshot, decode, decode_layout, encode
from ckptd.format.shard import block_bounds
from ckptd.limits import BLOCK_BYTES_WRITTEN
from ckptd.storage import Backend, LeavingUploads, Limits, with_standard_wrappers
from ckptd_backends.local import LocalBackend, LocalOptions
from ckptd_backends.sources import Whole
from tests.daemon.member import RUN, Member
from tests.power.disk import Disk
from tests.power.files import ModelFiles, PowerLost
from tests.power.promises import Broken, Promises, Recorded
from tests.power.steady import InPlace, run_steadily

ROOT = "/disk"
SHARD_BYTES = 9_000
STEPS_A_LIFE = 3
KEPT = 2
PACES = ((3, (10, 260), 0.6), (10, (3, 60), 0.2))
"""How many lives are cut off, after how many changes of the disk, and how often the power goes with them."""
NAMES = ("link", "rename", "unlink")
"""Changes that are seen before they are durable: the worst moments to be cut off."""
ALL = (*NAMES, "create", "allocate", "write", "fsync", "make_directory", "remove_directory", "fsync_directory")
CHANCES = (0.0, 1.0, 0.5)
"""Of a change that was not synced to survive, for each look at what a loss of power would leave."""


class Snapshotted(Whole):
    """What a slot holds, as the source of a put; in aligned memory, so that it is written directly."""

    resident_blocks = b""
    unhealthy = ""

    def __init__(self, shard: bytes, blocks: Blocks) -> None:
        memory = mmap.mmap(-1, len(shard))
        memory[:] = shard
        super().__init__(memoryview(memory))
        self.blocks = digest_blocks(self.view, list(zip(blocks.starts, blocks.stops, strict=True)))


@dataclass(frozen=True)
class Pending:
    """A save whose snapshot a trainer still holds in memory."""

    member: Member
    step: int

    @property
    def version(self) -> Version:
        return Version(self.step, self.member.generation)


@dataclass
class Story:
    """One seed: a disk, what was promised on it, and how it goes on."""

    seed: int
    hurried: bool = False
    """Nothing cuts the first life off but itself, and no rank skips; the power stays then, and the next life finds the
    store full."""
    promises: Promises = field(default_factory=Promises)
    pending: Pending | None = None
    changes: int = 0
    looks: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._lives, self._changes_a_life, self._power_lost = PACES[self.seed % len(PACES)]
        self._process = ModelFiles(Disk(ROOT))
        self._stop_after = 0
        self._stop_at = NAMES
        self._broken: Broken | None = None

    def tell(self) -> None:
        """Raises :class:`Broken` where a promise was."""
        with mock.patch("ckptd_backends.local_writer.DIRECT_BYTES_MIN", 4096), _announcing(self.promises.going):
            for number in range(self._lives + 1):
                disk = self._process.disk
                self._process = ModelFiles(disk)
                disk.changed = self._look
                calm = number == self._lives or (self.hurried and number == 0)
                self._stop_after = sys.maxsize if calm else self.changes + self.random.randint(*self._changes_a_life)
                self._stop_at = self.random.choice([NAMES, NAMES, ALL])
                with contextlib.suppress(PowerLost):
                    run_steadily(Life(self, self._process).live(), random.Random(f"{self.seed} {number}"))
                self._process.stopped = True
                if self._broken is not None:
                    raise self._broken
                if not (self.hurried and calm) and self.random.random() < self._power_lost:
                    self._lose_power(disk)

    def _lose_power(self, disk: Disk) -> None:
        left = disk.without_power(self.random, self.random.choice([*CHANCES, 0.2, 0.8]))
        self.promises.after_power_loss(below_root(left.files()))
        self._process = ModelFiles(left)
        self.pending = None

    def _look(self, what: str) -> None:
        """After each change of the disk: what if the power went now?"""
        self.changes += 1
        if self._process.stopped:
            return
        for chance in CHANCES:
            self.looks += 1
            try:
                self.promises.check(below_root(self._process.disk.left(self.random, chance)))
            except Broken as broken:
                broken.add_note(f"seed {self.seed}, change {self.changes} of the disk, chance {chance}")
                self._broken = broken
                self._process.stopped = True
                return
        self._process.stopped = self.changes >= self._stop_after and what in self._stop_at

    def broke(self, broken: Broken) -> None:
        """Not seen on the disk, but by who reads it."""
        broken.add_note(f"seed {self.seed}, change {self.changes} of the disk")
        self._broken = self._broken or broken
        self._process.stopped = True
        raise PowerLost


def contents_of(member: Member, step: int) -> tuple[bytes, Contents]:
    """A rank's shard, and what its slot says that it holds."""
    content = member.content(step, SHARD_BYTES)
    snapshot = decode(content.doc, Snapshot)
    layout = decode_layout(snapshot.layout)
    sizes = [piece.bytes for piece in check_layout(layout)]
    blocks = Blocks.of(block_bounds(layout.header_bytes, sizes, BLOCK_BYTES_WRITTEN))
    return content.shard, Contents(content.doc, snapshot, layout.header_bytes, blocks)


def below_root(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """By key."""
    return {path.removeprefix("run/"): data for path, data in files.items()}


class Life:
    """One process, from its start until it is cut off, or has saved all of its steps."""

    def __init__(self, story: Story, files: ModelFiles) -> None:
        self.story = story
        self.random = story.random
        self.promises = story.promises
        local = LocalBackend(f"{ROOT}/run", LocalOptions(part_bytes=4096), files)
        local._pool._executor = InPlace(1)  # pyright: ignore[reportPrivateUsage]
        self.backend: Backend = with_standard_wrappers(Recorded(local, story.promises), Limits())
        self.commits = Commits(Patience(30.0, 1.0), lambda work, name: asyncio.create_task(work, name=name))
        self.run = Run(self.backend, RUN)
        self._retiring: asyncio.Task[None] | None = None

    async def live(self) -> None:
        with contextlib.suppress(AlreadyExists):
            await self.backend.put(keys.RUN, encode(records.Run(run=RUN)), if_absent=True)
        self.run = await Run.open(self.backend)
        opened_from = await self._newest()
        assert isinstance(self.backend, LeavingUploads)
        await self.backend.abort_stale_uploads()
        if self.story.pending is not None:
            await self._save(self.story.pending, adopted=True)
            opened_from = await self._newest()
        world = self.random.choice([1, 2, 3])
        record = await self.run.open_generation(
            launch="launch#0", world=world, opened_from=opened_from, host="h", pid=1
        )
        if self.story.hurried or self.random.random() < 0.5:
            await self._retire_soon(record.generation)  # as when the first save finds the store full
        parent = opened_from and Parent(generation=opened_from.generation, step=opened_from.step)
        member = Member(self.backend.url, world=world, generation=record.generation, parent=parent)
        first = (opened_from.step if opened_from else 0) + 1
        for step in range(first, first + STEPS_A_LIFE):
            await self._save(Pending(member, step), adopted=False)
        if self._retiring is not None:
            await self._retiring
        await self._newest()
        if left := [key for key in below_root(self._disk.files()) if "~" in key]:
            self.story.broke(Broken(f"{left} were left behind"))

    @property
    def _disk(self) -> Disk:
        return self.story._process.disk  # pyright: ignore[reportPrivateUsage]

    async def _newest(self) -> Version | None:
        """What a restore would take, verified; never less than what was promised."""
        newest = await self.run.latest()
        promised = self.promises.committed - self.promises.going
        if newest is None and promised:
            self.story.broke(Broken(f"{max(promised)} was committed, and nothing is found"))
        if newest is not None and not (found := await verify(self.run, newest)).good:
            self.story.broke(Broken(f"{newest} is the newest, and is bad: {found.reason}"))
        return newest

    # Saving

    async def _save(self, pending: Pending, *, adopted: bool) -> None:
        self.story.pending = pending
        try:
            await save(self, pending, adopted)
        except SaveSkipped:
            return
        finally:
            if not self._stopped:
                self.story.pending = None
        self.promises.committed.add(pending.version)
        await self._retire_soon(pending.member.generation)

    async def _retire_soon(self, generation: int) -> None:
        """Beside what follows; one pass at a time."""
        if self._retiring is not None:
            await self._retiring
        self._retiring = asyncio.create_task(self._retire(generation))

    @property
    def _stopped(self) -> bool:
        return self.story._process.stopped  # pyright: ignore[reportPrivateUsage]

    async def upload_rank(self, pending: Pending, rank: int, *, adopted: bool) -> bytes:
        """A rank's snapshot, until the trainer is told that it is durable."""
        await asyncio.sleep(self.random.random())
        shard, contents = contents_of(replace(pending.member, rank=rank), pending.step)
        receipt = await existing_receipt(self.backend, contents) if adopted else None
        if receipt is None:
            owner = cast(Any, SimpleNamespace(dead=adopted, connected=not adopted))
            source = cast(Any, Snapshotted(shard, contents.blocks))
            receipt = (await upload(self.backend, contents, source, owner)).receipt
        self.promises.durable.add((pending.version, rank, pending.member.world))
        return receipt

    def checkpoint(self, pending: Pending) -> Checkpoint:
        return Checkpoint(self.backend, pending.version, pending.member.world, RUN)

    async def _retire(self, generation: int) -> None:
        with contextlib.suppress(Superseded):
            # Without grace: while a deletion waits, others' commits make durable what it builds on.
            keep = Keep(last=KEPT)
            outcome = await retention.apply(self.run, keep, generation=generation, grace_seconds=0.0)
            if outcome.failed:
                self.story.broke(Broken(f"retention failed: {outcome.failed}"))


@contextlib.contextmanager
def _announcing(going: set[Version]) -> Iterator[None]:
    """Take down what retention says that it deletes, before it does."""
    deleting = cast(Any, retention)._Pass
    delete = deleting._delete_committed

    async def noted(this: Any, version: Version) -> None:
        going.add(version)
        await delete(this, version)

    with mock.patch.object(deleting, "_delete_committed", noted):
        yield


async def save(life: Life, pending: Pending, adopted: bool) -> None:
    """As daemons do: all ranks at once, a commit that each joins when its receipt is durable."""
    world = pending.member.world
    may_skip = world > 1 and not adopted and not life.story.hurried
    left_out = world - 1 if may_skip and life.random.random() < 0.1 else None

    async def rank(number: int) -> None:
        if number == left_out:
            await life.commits.skip(life.checkpoint(pending), number, "lost")
            raise SaveSkipped("lost")
        receipt = await life.upload_rank(pending, number, adopted=adopted)
        await life.commits.join(
            life.checkpoint(pending), {number: receipt}, lambda _: None, resumed=adopted, leads=adopted
        )

    done = await asyncio.gather(*(rank(number) for number in range(world)), return_exceptions=True)
    for error in sorted((error for error in done if error is not None), key=lambda e: isinstance(e, SaveSkipped)):
        raise error
