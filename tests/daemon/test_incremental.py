"""What is unchanged since an older checkpoint is referred to, and that one stays as long as it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.retention import apply
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.survey import Survey
from ckptd.checkpoint.tensors import find_tensor, read_region
from ckptd.checkpoint.verify import verify
from ckptd.format.keys import Version, generation_key, tombstone_key
from ckptd.format.records import Parent, Receipt, ShardProof, Span, Tombstone, decode, encode
from ckptd.storage import open_backend
from ckptd.wire.messages import Committed, Failed
from devtools.processes import wait_until
from tests.daemon.stored import manifest, receipt, run_folder
from tests.daemon.trainer import RUN, Content, DaemonProcess, Member, Trainer, daemon_at, trainer
from tests.format.saved import Held, Rank

HEADER = 4096
SLOT = 8 << 20
FROZEN = bytes(i * i % 251 for i in range(1_500_000))
"""More than one digest block."""

Parts = Mapping[str, bytes]


def trained(step: int, size: int = 200_000) -> bytes:
    """What is another one after each step."""
    return bytes((step + 3 * i) % 256 for i in range(256)) * (size // 256)


def parts_of(step: int) -> Parts:
    """A frozen embedding and a trained head."""
    return {"embedding": FROZEN, "head": trained(step)}


def content(member: Member, step: int, parts: Parts) -> Content:
    """A snapshot; of each tensor every rank holds an equal range."""
    held: list[Held] = []
    for name, data in parts.items():
        size = len(data) // member.world
        span = Span(member.rank * size, (member.rank + 1) * size)
        held.append(Held(name, "uint8", (size * member.world,), [(span, data[span.start : span.stop])]))
    rank = Rank(
        held,
        rank=member.rank,
        world=member.world,
        step=step,
        generation=member.generation,
        run=RUN,
        launch=member.launch,
        parent=member.parent and member.parent.version,
    )
    layout, shard = rank.stored()
    return Content(shard, encode(rank.snapshot(layout)), rank.version)


@contextlib.contextmanager
def trains(daemon: DaemonProcess, member: Member) -> Generator[Trainer]:
    """A trainer of a generation that was opened."""
    opened = run_folder(member.url) / generation_key(member.generation)
    opened.parent.mkdir(parents=True, exist_ok=True)
    opened.write_bytes(encode(replace(member, rank=0).record))
    with trainer(daemon.socket, member, slot_bytes=SLOT) as session:
        yield session


def save(session: Trainer, step: int, parts: Parts) -> Version:
    """To its commit."""
    found = content(session.member, step, parts)
    session.put(found)
    outcome = session.outcome(step)
    assert isinstance(outcome, Committed), outcome
    return found.version


def proof(url: str, version: Version, rank: int = 0, world: int = 1) -> ShardProof:
    data = receipt(url, version, rank, world)
    assert data is not None
    return decode(data, Receipt).shard


def stored_bytes(url: str, version: Version) -> int:
    """On disk, of shards."""
    return sum(path.stat().st_size for path in (run_folder(url) / f"checkpoints/{version}").glob("*.safetensors"))


async def check_restored(run: Run, version: Version, parts: Parts) -> None:
    """It verifies, and has these bytes."""
    found = await verify(run, version)
    assert found.good, found.reason
    async with await CheckpointReader.open(run, version) as reader:
        for name, data in parts.items():
            tensor = await find_tensor(reader, name, None)
            assert tensor is not None
            out = bytearray(tensor.size_bytes)
            await read_region(reader, tensor, region(tensor.shape), memoryview(out))
            assert out == data[: len(out)]


def check_restores(url: str, version: Version, parts: Parts) -> None:
    """As :func:`check_restored`."""

    async def check() -> None:
        async with contextlib.aclosing(open_backend(url)) as backend:
            await check_restored(await Run.open(backend), version, parts)

    asyncio.run(check())


def test_only_what_has_changed_is_stored(daemon: DaemonProcess, tmp_run: str) -> None:
    with trains(daemon, Member(tmp_run)) as session:
        made = [save(session, step, parts_of(step)) for step in (1, 2, 3)]
        assert stored_bytes(tmp_run, made[0]) == HEADER + len(FROZEN) + len(trained(1))
        first = proof(tmp_run, made[0])
        for step, version in enumerate(made[1:], 2):
            assert stored_bytes(tmp_run, version) == HEADER + len(trained(step))
            shard = proof(tmp_run, version)
            (reference,) = shard.references  # to the object that holds the bytes, not to the save before
            assert (reference.key, reference.bytes) == (first.key, first.bytes)
            assert [extent.bytes for extent in reference.extents] == [len(FROZEN)]
            found = manifest(tmp_run, version)
            assert found is not None
            assert (found.references, found.referenced_bytes) == ((str(made[0]),), len(FROZEN))
            assert found.held_bytes == first.bytes
        assert session.status()["counts"]["referenced_bytes"] == 2 * len(FROZEN)
    for step, version in enumerate(made, 1):
        check_restores(tmp_run, version, parts_of(step))
    assert not list(run_folder(tmp_run).glob("leases/reference-*"))


def test_where_nothing_has_changed_only_a_header_is_stored(daemon: DaemonProcess, tmp_run: str) -> None:
    with trains(daemon, Member(tmp_run)) as session:
        made = [save(session, step, parts_of(0)) for step in (1, 2, 3)]
    assert [stored_bytes(tmp_run, version) for version in made[1:]] == [HEADER, HEADER]
    check_restores(tmp_run, made[2], parts_of(0))


def test_who_does_not_want_it_stores_everything(daemon: DaemonProcess, tmp_run: str) -> None:
    with trains(daemon, Member(tmp_run, incremental=False)) as session:
        made = [save(session, step, parts_of(0)) for step in (1, 2)]
    assert stored_bytes(tmp_run, made[0]) == stored_bytes(tmp_run, made[1])


def test_for_a_small_part_no_old_checkpoint_is_kept(daemon: DaemonProcess, tmp_run: str) -> None:
    with trains(daemon, Member(tmp_run)) as session:
        for step in (1, 2):
            version = save(session, step, {"head": trained(step, 900_000), "frozen": FROZEN[:100_000]})
    assert not proof(tmp_run, version).references


def test_what_is_frozen_later_is_noticed(daemon: DaemonProcess, tmp_run: str) -> None:
    """Writing no longer waits for the comparison once nothing was unchanged; one save later it does again."""
    with trains(daemon, Member(tmp_run)) as session:
        for step in (1, 2, 3):
            version = save(session, step, {"body": trained(step, 900_000), "head": trained(step)})
            assert not proof(tmp_run, version).references
        for step in (4, 5):
            version = save(session, step, {"body": trained(3, 900_000), "head": trained(step)})
        assert stored_bytes(tmp_run, version) == HEADER + len(trained(5))
        assert [name[:12] for name in proof(tmp_run, version).references[0].key.split("/")[1:2]] == [f"{4:012d}"]


def test_what_others_need_is_not_pruned(daemon: DaemonProcess, tmp_run: str) -> None:
    with trains(daemon, Member(tmp_run, keep_last=1)) as session:
        made = [save(session, step, parts_of(step)) for step in (1, 2, 3)]
        folder = run_folder(tmp_run) / "manifests"
        there = {f"{made[0]}.json", f"{made[2]}.json"}
        wait_until(lambda: {path.name for path in folder.iterdir()} == there, "retention", deadline_seconds=10)
        assert survey(tmp_run) == {made[2]: "one of the last 1", made[0]: "3-g1 needs bytes of it"}
        check_restores(tmp_run, made[2], parts_of(3))
        last = save(session, 4, {"embedding": FROZEN[::-1], "head": trained(4)})
        wait_until(
            lambda: {path.name for path in folder.iterdir()} == {f"{last}.json"}, "retention", deadline_seconds=10
        )


def survey(url: str) -> dict[Version, str]:
    """What is kept, and why."""

    async def look() -> dict[Version, str]:
        async with contextlib.aclosing(open_backend(url)) as backend:
            return (await Survey(await Run.open(backend), Keep(last=1)).look()).plan.keep

    return asyncio.run(look())


def test_a_suspect_checkpoint_is_not_referred_to(daemon: DaemonProcess, tmp_run: str) -> None:
    async def suspect(version: Version) -> None:
        async with contextlib.aclosing(open_backend(tmp_run)) as backend:
            await (await Run.open(backend)).add_mark(version, "suspect", by="test", reason="it rots")

    with trains(daemon, Member(tmp_run)) as session:
        first = save(session, 1, parts_of(1))
        save(session, 2, parts_of(2))
        asyncio.run(suspect(first))
        third = save(session, 3, parts_of(3))
        assert not proof(tmp_run, third).references
        fourth = save(session, 4, parts_of(4))  # what was stored anew may be
        fifth = save(session, 5, parts_of(5))
    assert {reference.key for reference in proof(tmp_run, fifth).references} == {proof(tmp_run, third).key}
    check_restores(tmp_run, fourth, parts_of(4))


def test_damage_in_what_is_referred_to_is_found(daemon: DaemonProcess, tmp_run: str) -> None:
    with trains(daemon, Member(tmp_run)) as session:
        made = [save(session, step, parts_of(step)) for step in (1, 2)]
    path = run_folder(tmp_run) / proof(tmp_run, made[0]).key
    data = bytearray(path.read_bytes())
    data[HEADER + 700_000] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)

    async def look() -> str:
        async with contextlib.aclosing(open_backend(tmp_run)) as backend:
            return (await verify(await Run.open(backend), made[1])).reason

    reason = asyncio.run(look())
    assert path.name in reason
    assert "of tensor 'embedding', differ from their digest" in reason


def both(daemon: DaemonProcess, stack: contextlib.ExitStack, member: Member) -> list[Trainer]:
    """The ranks of a world of two."""
    members = [replace(member, rank=rank, world=2) for rank in range(2)]
    return [stack.enter_context(trains(daemon, one)) for one in members]


def test_a_daemon_killed_before_the_commit_leaves_a_commit_that_holds(socket_path: Path, tmp_run: str) -> None:
    """Rank 0's shard refers to the first checkpoint when its daemon dies; the next one proves and commits it."""
    with contextlib.ExitStack() as stack:
        with daemon_at(socket_path) as daemon, contextlib.ExitStack() as first:
            sessions = both(daemon, first, Member(tmp_run))
            for session in sessions:
                session.put(content(session.member, 1, parts_of(1)))
            assert isinstance(sessions[0].outcome(1), Committed)
            at = sessions[0].put(content(sessions[0].member, 2, parts_of(2)))
            sessions[0].durable(at)
            assert list(run_folder(tmp_run).glob("leases/reference-*"))
            daemon.kill()
        daemon = stack.enter_context(daemon_at(socket_path.with_name("e.sock"), "--commit-takeover", "0.2"))
        sessions = both(daemon, stack, Member(tmp_run))
        sessions[1].put(content(sessions[1].member, 2, parts_of(2)))
        assert isinstance(sessions[1].outcome(2), Committed)
    version = Version(2, 1)
    for rank in range(2):
        assert proof(tmp_run, version, rank, 2).references
    check_restores(tmp_run, version, parts_of(2))


def test_nothing_is_committed_over_bytes_that_are_being_deleted(daemon: DaemonProcess, tmp_run: str) -> None:
    with contextlib.ExitStack() as stack:
        sessions = both(daemon, stack, Member(tmp_run))
        for session in sessions:
            session.put(content(session.member, 1, parts_of(1)))
        assert isinstance(sessions[0].outcome(1), Committed)
        sessions[0].durable(sessions[0].put(content(sessions[0].member, 2, parts_of(2))))
        announced = run_folder(tmp_run) / tombstone_key(Version(1, 1))
        announced.parent.mkdir(exist_ok=True)
        announced.write_bytes(encode(Tombstone(reason="test", version=str(Version(1, 1)))))
        sessions[1].put(content(sessions[1].member, 2, parts_of(2)))
        failed = sessions[0].outcome(2)
        assert isinstance(failed, Failed)
        assert "needs bytes of a checkpoint that has gone" in failed.message
        assert not proof(tmp_run, Version(2, 1), 1, 2).references  # it knew already
        announced.unlink()
        for session in sessions:
            session.put(content(session.member, 3, parts_of(3)))
        assert isinstance(sessions[0].outcome(3), Committed)
    check_restores(tmp_run, Version(3, 1), parts_of(3))


def test_what_is_about_to_be_referred_to_is_held(daemon: DaemonProcess, tmp_run: str) -> None:
    async def prune() -> tuple[list[Version], dict[Version, str]]:
        async with contextlib.aclosing(open_backend(tmp_run)) as backend:
            outcome = await apply(await Run.open(backend), Keep(last=1), generation=1, grace_seconds=0)
            return outcome.deleted, outcome.waiting

    with contextlib.ExitStack() as stack:
        sessions = both(daemon, stack, Member(tmp_run))
        for step, frozen in ((1, FROZEN), (2, FROZEN), (3, FROZEN[::-1])):
            if step == 3:  # a save whose commit comes late: rank 1 is slow
                sessions[0].durable(sessions[0].put(content(sessions[0].member, 5, parts_of(5))))
            for session in sessions:
                session.put(content(session.member, step, {"embedding": frozen, "head": trained(step)}))
            assert isinstance(sessions[0].outcome(step), Committed)
        deleted, waiting = asyncio.run(prune())
        assert deleted == [Version(2, 1)]
        assert "process" in waiting[Version(1, 1)]
        sessions[1].put(content(sessions[1].member, 5, parts_of(5)))
        assert isinstance(sessions[0].outcome(5), Committed)
        assert asyncio.run(prune()) == ([Version(3, 1)], {})
    check_restores(tmp_run, Version(5, 1), parts_of(5))


def test_the_next_life_goes_on_from_what_its_parent_holds(socket_path: Path, tmp_run: str) -> None:
    with daemon_at(socket_path) as daemon, trains(daemon, Member(tmp_run)) as session:
        parent = save(session, 1, parts_of(1))
    member = Member(tmp_run, generation=2, launch="launch#1", parent=Parent(generation=1, step=1))
    with (
        daemon_at(socket_path.with_name("e.sock")) as daemon,
        trains(daemon, member) as session,
    ):
        version = save(session, 2, parts_of(2))
    (reference,) = proof(tmp_run, version).references
    assert reference.key == proof(tmp_run, parent).key
    check_restores(tmp_run, version, parts_of(2))


@pytest.mark.parametrize("every", [1, 3])
def test_a_further_tier_refers_to_what_it_has_itself(daemon: DaemonProcess, tmp_path: Path, every: int) -> None:
    near, far = f"file://{tmp_path / 'near'}", f"file://{tmp_path / 'far'}"
    member = Member(near, far_url=far, far_every_steps=every, keep_last=1)
    copied: list[Version] = []
    with trains(daemon, member) as session:
        save(session, 1, {"embedding": FROZEN[::-1], "head": trained(1)})
        wait_until(lambda: (run_folder(far) / f"manifests/{Version(1, 1)}.json").exists(), "1", deadline_seconds=20)
        for step in range(2, 8):
            version = save(session, step, parts_of(step))
            if step % every == 0:
                there = run_folder(far) / f"manifests/{version}.json"
                wait_until(there.exists, f"step {step} further out", deadline_seconds=20)
                copied.append(version)
    for number, version in enumerate(copied):
        check_restores(far, version, parts_of(version.step))
        found = manifest(far, version)
        assert found is not None
        assert found.references == (() if number == 0 else (str(copied[0]),))
        if number:
            assert stored_bytes(far, version) == HEADER + len(trained(version.step))


def test_each_disk_of_a_node_refers_to_what_it_holds(socket_path: Path, tmp_path: Path) -> None:
    """One disk is lost, so its rank stores everything again; the other's goes on as before, and all of it is copied."""
    shared = f"file://{tmp_path / 'shared'}"
    members = [
        Member(f"file://{tmp_path / f'disk{rank}'}", far_url=shared, world=2, shared=False, rank=rank)
        for rank in range(2)
    ]
    wait_for = run_folder(shared) / "manifests"
    parent: Parent | None = None
    for generation in (1, 2):
        life = [
            replace(one, generation=generation, parent=parent, launch=f"launch#{generation - 1}") for one in members
        ]
        with contextlib.ExitStack() as stack:
            sessions: list[Trainer] = []
            for member in life:
                socket = socket_path.with_name(f"{generation}{member.rank}.sock")
                sessions.append(stack.enter_context(trains(stack.enter_context(daemon_at(socket)), member)))
            version = Version(generation, generation)
            for session in sessions:
                session.put(content(session.member, version.step, parts_of(version.step)))
            for session in sessions:
                assert isinstance(session.outcome(version.step), Committed)
            wait_until((wait_for / f"{version}.json").exists, "the copy", deadline_seconds=20)
        if generation == 1:
            shutil.rmtree(run_folder(members[1].url))
            parent = Parent(generation=1, step=1)
    assert proof(members[0].url, version, 0, 2).references
    assert not proof(members[1].url, version, 1, 2).references
    for rank in range(2):
        assert proof(shared, version, rank, 2).references
    check_restores(shared, version, parts_of(2))
