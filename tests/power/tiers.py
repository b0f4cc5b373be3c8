"""Runs in two tiers on disks that lose power apart from each other, or are lost for good: one near each node, or
nearest to all ranks, and a further one; the real links copy from one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from ckptd.checkpoint import leases, retention
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.survey import order
from ckptd.checkpoint.tiers import open_generation, open_tiers, put_generation, put_run_id
from ckptd.checkpoint.verify import verify
from ckptd.daemon.bases import Bases
from ckptd.daemon.commit import Patience
from ckptd.daemon.commits import Commits
from ckptd.daemon.link import Link
from ckptd.daemon.owner import Owner, Seat
from ckptd.daemon.tier import Checkpoint, Tier
from ckptd.daemon.upload import existing_receipt, upload
from ckptd.errors import NoCheckpoint, SaveSkipped, Superseded
from ckptd.format import lineage
from ckptd.format.keys import Version
from ckptd.format.records import Parent
from ckptd.storage import Backend, LeavingUploads, Limits, with_standard_wrappers
from ckptd_backends.local import LocalBackend, LocalOptions
from tests.daemon.member import RUN, Member
from tests.power.disk import Disk
from tests.power.files import ModelFiles, PowerLost
from tests.power.life import ALL, CHANCES, KEPT, NAMES, Pending, Snapshotted, below_root, contents_of
from tests.power.promises import Broken, Promises, Recorded
from tests.power.steady import InPlace, run_steadily

LIVES = 4
STEPS_A_LIFE = 3
CHANGES_A_LIFE = (20, 420)
COPY_SECONDS_MAX = 600.0
"""On the clock that jumps: how long the last copy of a story may take."""


class Place:
    """A disk of its own, with what was promised on it."""

    def __init__(self, name: str, holds: frozenset[int] | None) -> None:
        """``holds``: the nodes whose ranks' shards lie there; ``None``: all."""
        self.name = name
        self.holds = holds
        self.nodes = 1
        self.new()

    def new(self) -> None:
        """Nothing was ever stored there."""
        self.disk = Disk(f"/{self.name}")
        self.promises = Promises(self.has)

    def has(self, rank: int) -> bool:
        """Whether the shard of a rank is to lie there."""
        return self.holds is None or rank % self.nodes in self.holds

    @property
    def url(self) -> str:
        return f"file:///{self.name}/run"

    def lose_power(self, source: random.Random) -> None:
        self.disk = self.disk.without_power(source, source.choice([*CHANCES, 0.2, 0.8]))
        self.promises.after_power_loss(below_root(self.disk.files()))

    def check(self, source: random.Random, chance: float) -> None:
        self.promises.check(below_root(self.disk.left(source, chance)))


class TieredStory:
    """One seed. Its last life is not cut off."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(f"tiers {seed}")
        self.nodes = 1 + seed % 2
        self.far = Place("far", None)
        self.near = [Place(f"near{node}", frozenset({node})) for node in range(self.nodes)]
        for place in self.places:
            place.nodes = self.nodes
        self.pending: Pending | None = None
        self.opened: dict[int, Version | None] = {}
        """Generation → what it was opened from."""
        self.changes = self.looks = self.copied = self.lost = 0
        self.processes: list[ModelFiles] = []
        self._stop_after = 0
        self._stop_at = NAMES
        self._broken: Broken | None = None

    @property
    def places(self) -> list[Place]:
        """The further one last."""
        return [*self.near, self.far]

    def tell(self) -> None:
        """Raises :class:`Broken` where a promise was."""
        for number in range(LIVES + 1):
            last = number == LIVES
            self.processes = []
            for place in self.places:
                place.disk.changed = lambda what, place=place: self._look(place, what)  # type: ignore[misc]
            self._stop_after = sys.maxsize if last else self.changes + self.random.randint(*CHANGES_A_LIFE)
            self._stop_at = self.random.choice([NAMES, NAMES, ALL])
            life = TieredLife(self, last=last)
            with contextlib.suppress(PowerLost), self._watched(number):
                run_steadily(life.live(), random.Random(f"tiers {self.seed} {number}"))
            self.stop()
            if self._broken is not None:
                raise self._broken
            if not last:
                self._lose_something()

    @contextlib.contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        """Deletions are taken down before they are made; a lease ends with its process."""
        deleting = cast(Any, retention)._Pass
        delete = deleting._delete_committed
        promises = {place.url: place.promises for place in self.places}
        me = f"{self.seed} {number}"

        async def noted(this: Any, version: Version) -> None:
            promises[this.survey.run.backend.url].going.add(version)
            await delete(this, version)

        with (
            mock.patch("ckptd_backends.local_writer.DIRECT_BYTES_MIN", 4096),
            mock.patch.object(deleting, "_delete_committed", noted),
            mock.patch.object(leases, "own_identity", return_value=me),
            mock.patch.object(leases, "is_gone", lambda process: process != me),
        ):
            yield

    def stop(self) -> None:
        for process in self.processes:
            process.stopped = True

    @property
    def stopped(self) -> bool:
        return any(process.stopped for process in self.processes)

    def _lose_something(self) -> None:
        """Each machine loses power, its memory with it, or not; then one disk of a kind may be lost for good."""
        for place in self.places:
            if self.random.random() < 0.4:
                place.lose_power(self.random)
                if place is not self.far:
                    self.pending = None
        what = self.random.choice(["nothing", "nothing", "near", "near", "far"])
        if what == "near":
            self.random.choice(self.near).new()
            self.pending = None
        elif what == "far" and self.random.random() < 0.5:
            self.far.new()
        self.lost += what != "nothing"

    def _look(self, place: Place, what: str) -> None:
        """After each change of a disk: what if the power went there now?"""
        self.changes += 1
        if self.stopped:
            return
        for chance in CHANCES:
            self.looks += 1
            try:
                place.check(self.random, chance)
            except Broken as broken:
                self.note(broken, f"change {self.changes}, chance {chance}, at {place.name}")
                return
        if self.changes >= self._stop_after and what in self._stop_at:
            self.stop()

    def note(self, broken: Broken, where: str) -> None:
        broken.add_note(f"seed {self.seed}, {where}")
        self._broken = self._broken or broken
        self.stop()

    def broke(self, what: str) -> None:
        """Not seen on a disk, but by who reads it."""
        self.note(Broken(what), f"change {self.changes}")
        raise PowerLost


class Node:
    """A daemon, with the disk near it and its way to the further tier."""

    def __init__(self, life: TieredLife, number: int) -> None:
        self.life = life
        self.number = number
        self.place = life.story.near[number]
        self.near, self.far = life.open(self.place), life.open(life.story.far)
        self.commits = Commits(Patience(60.0, 5.0), lambda work, name: asyncio.create_task(work, name=name))
        self.link = Link(1, self.commits, Bases(), self._copied, lambda link, error: None)
        self.owners: dict[int, Owner] = {}
        self.copying: asyncio.Task[None] | None = None

    def begin(self, member: Member) -> None:
        """Trainers sit here now."""
        keep = Keep(last=KEPT)
        shared = self.life.story.nodes == 1
        near = Tier(0, self.near, keep, self.near, self.near, {}, shared=shared)
        far = Tier(1, self.far, keep, self.far, self.far, {})
        for rank in range(self.number, member.world, self.life.story.nodes):
            owner = Owner(
                seat=Seat(self.near.url, rank),
                world=member.world,
                launch=member.launch,
                tiers=(near, far),
                process=cast(Any, SimpleNamespace(alive=True)),
                send=lambda message: None,
            )
            self.owners[rank] = owner
            self.link.join(owner)
        self.copying = asyncio.create_task(self.link.run())

    def checkpoint(self, held: Pending) -> Checkpoint:
        owner = next(iter(self.owners.values()))
        return Checkpoint(self.near, held.version, held.member.world, RUN, owner.exchange(owner.nearest))

    def _copied(self, owner: Owner, tier: Tier, run: str, version: Version) -> None:
        self.life.story.far.promises.committed.add(version)
        self.life.story.copied += 1
        if 0 in self.owners:
            self.life.retire_soon(self.far, version.generation)
        self.life.retire_soon(self.near, version.generation, self.link)


class TieredLife:
    """All processes of one start, until they are cut off together, or have saved and copied all of their steps."""

    def __init__(self, story: TieredStory, *, last: bool) -> None:
        self.story = story
        self.random = story.random
        self._last = last
        self._retiring: dict[str, asyncio.Task[None]] = {}

    def open(self, place: Place) -> Backend:
        files = ModelFiles(place.disk)
        self.story.processes.append(files)
        local = LocalBackend(place.url.removeprefix("file://"), LocalOptions(part_bytes=4096), files)
        local._pool._executor = InPlace(1)  # pyright: ignore[reportPrivateUsage]
        return with_standard_wrappers(Recorded(local, place.promises), Limits())

    async def live(self) -> None:
        self.nodes = [Node(self, number) for number in range(self.story.nodes)]
        zero = self.nodes[0]
        tiers = await self._tiers(zero)
        for backend in [*(node.near for node in self.nodes), zero.far]:
            assert isinstance(backend, LeavingUploads)
            await backend.abort_stale_uploads()
        pending = self.story.pending
        if pending is not None:
            await self._begin(pending.member)
            await self._save(pending, adopted=True)
        opened_from = await self._newest()
        world = self.story.nodes * self.random.choice([1, 2])
        record = await open_generation(tiers, launch="launch#0", world=world, opened_from=opened_from, host="h", pid=1)
        self.story.opened[record.generation] = opened_from
        for node in self.nodes[1:]:
            await put_generation(node.near, record)
        parent = opened_from and Parent(generation=opened_from.generation, step=opened_from.step)
        member = Member(zero.near.url, world=world, generation=record.generation, parent=parent)
        await self._begin(member)
        first = (opened_from.step if opened_from else 0) + 1
        for step in range(first, first + STEPS_A_LIFE):
            await self._save(Pending(member, step), adopted=False)
        await self._settle(Version(first + STEPS_A_LIFE - 1, record.generation))
        await self._newest()

    async def _tiers(self, zero: Node) -> Any:
        try:
            await open_tiers([zero.near, zero.far])
        except NoCheckpoint:
            await put_run_id(zero.far, RUN)
        tiers = await open_tiers([zero.near, zero.far], create=True)
        for node in self.nodes[1:]:
            await put_run_id(node.near, RUN)
        return tiers

    async def _begin(self, member: Member) -> None:
        for node in self.nodes:
            if node.copying is not None:
                node.copying.cancel()
                await asyncio.wait([node.copying])
                node.owners.clear()
                node.link.members.clear()
            node.begin(member)

    # Saving and copying

    async def _save(self, held: Pending, *, adopted: bool) -> None:
        self.story.pending = held
        try:
            done = await asyncio.gather(
                *(self._save_rank(held, rank, adopted=adopted) for rank in range(held.member.world)),
                return_exceptions=True,
            )
            for error in sorted((e for e in done if e is not None), key=lambda e: isinstance(e, SaveSkipped)):
                raise error
        except SaveSkipped:
            return
        finally:
            if not self.story.stopped:
                self.story.pending = None

    async def _save_rank(self, held: Pending, rank: int, *, adopted: bool) -> None:
        await asyncio.sleep(self.random.random())
        node = self.nodes[rank % len(self.nodes)]
        shard, contents = contents_of(replace(held.member, rank=rank), held.step)
        receipt = await existing_receipt(node.near, contents) if adopted else None
        if receipt is None:
            source = cast(Any, Snapshotted(shard, contents.blocks))
            owner = cast(Any, SimpleNamespace(dead=adopted, connected=not adopted))
            receipt = (await upload(node.near, contents, source, owner)).receipt
        node.place.promises.durable.add((held.version, rank, held.member.world))
        checkpoint = node.checkpoint(held)
        await asyncio.shield(
            node.commits.join(checkpoint, {rank: receipt}, lambda _: None, resumed=adopted, leads=adopted)
        )
        node.place.promises.committed.add(held.version)
        node.link.nudge(held.version)
        self.retire_soon(node.near, held.version.generation, node.link)

    def retire_soon(self, backend: Backend, generation: int, link: Link | None = None) -> None:
        """Beside what follows; one pass at a time at each root."""
        before = self._retiring.get(backend.url)
        self._retiring[backend.url] = asyncio.create_task(self._retire(backend, generation, link, before))

    async def _retire(
        self, backend: Backend, generation: int, link: Link | None, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await before
        held = None if link is None else link.held
        with contextlib.suppress(Superseded):
            outcome = await retention.apply(
                Run(backend, RUN), Keep(last=KEPT), generation=generation, held=held, grace_seconds=0.0
            )
            if outcome.failed:
                self.story.broke(f"retention at {backend.url} failed: {outcome.failed}")

    async def _settle(self, newest: Version) -> None:
        """Until the links rest, or for some time; at the end of a story, until the newest is there."""
        waited = 0.0
        promises = self.story.far.promises
        while waited < (COPY_SECONDS_MAX if self._last else self.random.choice([0, 2, 20])):
            if newest in promises.committed:
                break
            await self._pause(1.0)
            waited += 1.0
        if self._last and newest not in promises.committed:
            errors = [node.link.error for node in self.nodes]
            self.story.broke(f"{newest} is not copied: {errors}")
        for task in list(self._retiring.values()):
            await task

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.story.stopped:
            raise PowerLost

    # What a restore would take

    async def _newest(self) -> Version | None:
        """The newest that all ranks can read, never older than what was promised."""
        found: Version | None = None
        tiers = await open_tiers([self.nodes[0].near, self.nodes[0].far])
        for version in await tiers.line():
            if await self._is_good(version):
                found = version
                break
        promised = set.intersection(*(_safe(node.place) for node in self.nodes)) | _safe(self.story.far)
        # What was copied after the training had gone on from something older is beside the line, and stays there.
        everything = sorted({*promised, *await tiers.committed()}, key=order)
        line = lineage.line(everything, self.story.opened)
        best = next((version for version in line if version in promised), None)
        if best is not None and (found is None or order(found) < order(best)):
            self.story.broke(f"{best} was committed, and {found} is the newest that all can read")
        return found

    async def _is_good(self, version: Version) -> bool:
        """All of it in the further tier, or every node's part of it on its disk."""
        places: Sequence[tuple[Backend, Place]] = [(node.near, node.place) for node in self.nodes]
        near = [await self._verifies(backend, place, version) for backend, place in places]
        return all(near) or await self._verifies(self.nodes[0].far, self.story.far, version)

    async def _verifies(self, backend: Backend, place: Place, version: Version) -> bool:
        try:
            return (await verify(Run(backend, RUN), version, holds=place.has)).good
        except NoCheckpoint:
            return False


def _safe(place: Place) -> set[Version]:
    return place.promises.committed - place.promises.going
