"""Commits of many ranks: receipts pass through in bounded memory, and the proof has a process that may die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from bench.scale import VERSION, World
from ckptd.checkpoint import proofs
from ckptd.checkpoint.proofs import prover_for, start_prover
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import check_proof
from ckptd.daemon import proving
from ckptd.daemon.commit import Commit, Patience
from ckptd.daemon.proving import PROVERS_MAX, Proving
from ckptd.daemon.receipts import put_skipped
from ckptd.daemon.tier import Checkpoint
from ckptd.errors import CkptdError, CoverageError, IntegrityError, ProverEnded, SaveSkipped
from ckptd.format import keys
from ckptd.format.cover import pieces_in_file_order
from ckptd.format.digests import digest_blocks, hex_digest
from ckptd.format.keys import Version
from ckptd.format.proof import prove
from ckptd.format.records import Receipt, ShardProof, Snapshot, decode, decode_layout, encode
from ckptd.format.records import Run as RunRecord
from ckptd.format.shard import block_bounds
from ckptd.limits import BLOCK_BYTES_WRITTEN
from ckptd.storage import Backend, open_backend
from ckptd.wire.messages import Committed
from devtools.processes import wait_until
from tests.daemon.stored import manifest, run_folder
from tests.daemon.trainer import DaemonProcess, Member, daemon_at, trainer
from tests.format.saved import Held, Rank

MANY = World(ranks=300, tensors=20)
PATIENCE = Patience(commit_seconds=60, takeover_seconds=0.1)


@pytest.fixture(scope="module")
def receipts() -> list[bytes]:
    return [MANY.receipt(rank) for rank in range(MANY.ranks)]


@pytest.fixture
async def store(tmp_run: str) -> AsyncGenerator[Backend]:
    """The root of a run in which nothing is saved."""
    async with contextlib.aclosing(open_backend(tmp_run, {})) as backend:
        await backend.put(keys.RUN, encode(RunRecord(run="scale")))
        yield backend


async def put_receipts(store: Backend, receipts: list[bytes], ranks: list[int]) -> None:
    for rank in ranks:
        await store.put(keys.receipt_key(VERSION, rank, len(receipts)), receipts[rank])


def commit_at(store: Backend, world: int, *, leads: bool = True) -> Commit:
    commit = Commit(Checkpoint(store, VERSION, world, "scale"), PATIENCE, lambda rank: None, resumed=not leads)
    commit.leads = leads
    return commit


async def check_committed(store: Backend, receipts: list[bytes]) -> None:
    """Just what the receipts prove, in one piece, lies there."""
    expected = prove(receipts)
    assert expected.objects
    for key, data in {**expected.objects, keys.manifest_key(VERSION): encode(expected.manifest)}.items():
        assert await store.get(key, limit_bytes=1 << 30) == data


def provers(process: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process(process).children():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or a daemon of an earlier test
            if "ckptd.checkpoint.prover" in " ".join(child.cmdline()):
                found.append(child)
    return found


# The same commit, whichever way


def replicated() -> list[bytes]:
    """Parts that several ranks saved, so that some receipts are looked at twice; and what only a tree differs in."""
    held = [
        Held("w", "uint8", (8,), [(None, b"12345678")]),
        Held("model/v", "uint8", (4,), [(None, b"abcd")]),
    ]
    return [Rank(held, rank=rank, world=5).receipt() for rank in range(5)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("which", ["rows", "replicas"])
async def test_a_process_and_a_thread_prove_the_same(which: str, early: bool, large: bool) -> None:
    world = [World(ranks=9, tensors=4).receipt(rank) for rank in range(9)] if which == "rows" else replicated()
    if early and which == "replicas":  # of which the first release knew nothing
        world = [Rank([Held("w", "uint8", (8,), [(None, b"12345678")])], rank=0, world=1).receipt()]
    prover = await start_prover(len(world), early=early, large=large)
    assert bool(provers(os.getpid())) is large
    try:
        for data in world:
            await prover.add(data)
        looked = 0
        while ranks := await prover.questions():
            for rank in ranks:
                looked += 1
                await prover.look(rank, world[rank])
        found = await prover.commit()
    finally:
        await prover.aclose()
    assert bool(looked) is (which == "replicas" and not early)
    expected = prove(world, early=early)
    assert encode(found.manifest) == encode(expected.manifest)
    assert (found.objects, found.pinned) == (expected.objects, expected.pinned)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("wrong", ["order", "noise", "missing"])
async def test_a_process_and_a_thread_refuse_the_same(wrong: str, large: bool) -> None:
    world = [World(ranks=4, tensors=4).receipt(rank) for rank in range(4)]
    world = {"order": [world[1], *world[1:]], "noise": [world[0], b"{", *world[2:]], "missing": world[:2]}[wrong]

    async def attempt() -> None:
        async with prover_for(4, large=large) as prover:
            for data in world:
                await prover.add(data)
            await prover.questions()
            await prover.commit()

    with pytest.raises(CkptdError) as refused:
        await attempt()
    kind, message = {
        "order": (CoverageError, "receipt of rank 0 says that it is of rank 1"),
        "noise": (CkptdError, "not a record"),
        "missing": (CoverageError, "2 of 4 receipts"),
    }[wrong]
    assert isinstance(refused.value, kind)
    assert message in str(refused.value)


# The commit


@pytest.mark.parametrize("last", [0, 17, MANY.ranks - 1])
@pytest.mark.parametrize("leads", [True, False])
async def test_receipts_of_hundreds_of_ranks_pass_through(
    store: Backend, receipts: list[bytes], last: int, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_max = 6 * len(receipts[0])
    monkeypatch.setattr(proving, "HELD_BYTES_FULL", held_max)
    commit = commit_at(store, MANY.ranks, leads=leads)
    running = asyncio.create_task(commit.run())
    ranks = [rank for rank in range(MANY.ranks) if rank != last]
    random.Random(last).shuffle(ranks)
    for start in range(0, len(ranks), 50):
        await put_receipts(store, receipts, ranks[start : start + 50])
        commit.nudge()
        await asyncio.sleep(0.05)
        held = [len(commit.receipts.has(rank) or b"") for rank in range(MANY.ranks)]
        assert sum(held) <= 2 * held_max
    assert not running.done()
    await put_receipts(store, receipts, [last])
    commit.nudge()
    await running
    assert provers(os.getpid()) == []
    await check_committed(store, receipts)


async def test_a_rank_that_takes_no_part_is_heard_however_full_it_is(
    store: Backend, receipts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "HELD_BYTES_FULL", 1)
    await put_receipts(store, receipts, list(range(1, 299)))
    key = keys.receipt_key(VERSION, 299, MANY.ranks)
    await put_skipped(store, key, VERSION, 299, run="scale", reason="\x01" * 1000)
    with pytest.raises(SaveSkipped, match="rank 299 takes no part"):
        await commit_at(store, MANY.ranks).run()
    assert provers(os.getpid()) == []


async def test_what_does_not_belong_together_ends_the_commit(store: Backend, receipts: list[bytes]) -> None:
    other = of_another_launch(receipts[123])
    await put_receipts(store, [*receipts[:123], other, *receipts[124:]], list(range(MANY.ranks)))
    with pytest.raises(CoverageError, match="ranks 0 and 123 disagree on launch"):
        await commit_at(store, MANY.ranks).run()
    assert provers(os.getpid()) == []


def of_another_launch(data: bytes) -> bytes:
    """The receipt, as if it were."""
    receipt = decode(data, Receipt)
    snapshot = msgspec.structs.replace(decode(receipt.snapshot, Snapshot), launch="another")
    return encode(msgspec.structs.replace(receipt, snapshot=msgspec.Raw(encode(snapshot))))


def test_rank_0s_daemon_has_the_longer_the_more_there_is_to_prove() -> None:
    patience = Patience(commit_seconds=1800, takeover_seconds=15)
    assert 15 <= patience.before_takeover(10_000) <= 31
    assert 300 <= patience.before_takeover(3_200_000_000) <= 700
    assert 465 <= patience.before_takeover(10**15) <= 930


# A prover that dies


async def test_a_prover_that_is_killed_is_followed_by_another(
    receipts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "HELD_BYTES_FULL", 1)

    async def read(rank: int) -> bytes:
        return receipts[rank]

    found = Proving(MANY.ranks, read)
    try:
        for rank in range(MANY.ranks):
            found.take(rank, receipts[rank])
            await found.feed()
            if rank in (50, MANY.ranks - 1):
                kill_prover()
        commit = await found.prove()
    finally:
        await found.aclose()
    assert encode(commit.manifest) == encode(prove(receipts).manifest)


def kill_prover() -> None:
    (process,) = provers(os.getpid())
    process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, "its end", deadline_seconds=10)


async def test_provers_that_are_killed_again_and_again_fail_the_commit_and_the_next_try_commits(
    store: Backend, receipts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    async def start(count: int, **options: bool) -> proofs.Prover:
        prover = await start_prover(count, **options)
        begun.append(provers(os.getpid())[0].pid)
        kill_prover()
        return prover

    await put_receipts(store, receipts, list(range(MANY.ranks)))
    with pytest.MonkeyPatch.context() as killing:
        killing.setattr(proving, "start_prover", start)
        with pytest.raises(ProverEnded, match=r"ended with status -9"):
            await commit_at(store, MANY.ranks).run()
    assert len(set(begun)) == PROVERS_MAX
    await commit_at(store, MANY.ranks, leads=False).run()
    await check_committed(store, receipts)


def test_a_prover_ends_when_nobody_is_left_to_hear_it() -> None:
    argv = [sys.executable, "-m", "ckptd.checkpoint.prover", "100", "now"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a" + (1 << 20).to_bytes(8, "big"))  # and then nothing: it waits for its megabyte
        process.stdin.flush()
        process.stdout.close()
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


# The daemon


FEW = 40
"""Ranks whose receipts have a megabyte each."""


def large_receipt(member: Member) -> bytes:
    """As the daemon of another rank would have put it, with a long state tree."""
    content = member.content(1, 5000)
    snapshot = decode(content.doc, Snapshot)
    tree = msgspec.Raw(msgspec.json.encode(["x" * (1 << 20)]))
    layout = decode_layout(snapshot.layout)
    bounds = block_bounds(
        layout.header_bytes, [piece.bytes for piece in pieces_in_file_order(layout)], BLOCK_BYTES_WRITTEN
    )
    blocks = digest_blocks(memoryview(content.shard), bounds)
    shard = ShardProof(
        attempt="a",
        block_bytes=BLOCK_BYTES_WRITTEN,
        blocks=blocks,
        bytes=len(content.shard),
        checksum="",
        digest=hex_digest(blocks),
        key=keys.shard_key(content.version, member.rank, member.world, "a"),
    )
    return encode(Receipt(shard=shard, snapshot=msgspec.Raw(encode(msgspec.structs.replace(snapshot, tree=tree)))))


def put_file(member: Member) -> None:
    path = run_folder(member.url) / keys.receipt_key(Version(1, 1), member.rank, member.world)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_bytes(large_receipt(member))
    path.with_suffix(".new").rename(path)


@pytest.fixture
def member(tmp_run: str) -> Member:
    """Rank 0 of a world of which all others but the last have stored their receipts."""
    zero = Member(tmp_run, world=FEW)
    for rank in range(1, FEW - 1):
        put_file(replace(zero, rank=rank))
    return zero


@pytest.fixture
def own_daemon(socket_path: Path) -> Iterator[DaemonProcess]:
    with daemon_at(socket_path) as process:
        yield process


def begun_prover(daemon: DaemonProcess) -> psutil.Process:
    wait_until(lambda: bool(provers(daemon.process.pid)), "the prover", deadline_seconds=20)
    return provers(daemon.process.pid)[0]


def expected_manifest(member: Member) -> bytes:
    folder = run_folder(member.url)
    paths = [folder / keys.receipt_key(Version(1, 1), rank, FEW) for rank in range(FEW)]
    return encode(prove([path.read_bytes() for path in paths]).manifest)


def test_a_daemon_answers_while_it_proves(own_daemon: DaemonProcess, member: Member) -> None:
    with trainer(own_daemon.socket, member) as session:
        session.save(1, 5000)
        process = begun_prover(own_daemon)
        process.suspend()  # a proof that takes as long as we like
        put_file(replace(member, rank=FEW - 1))
        for _ in range(20):
            session.wait_for_stage(Version(1, 1), "commit")
        assert manifest(member.url, Version(1, 1)) is None
        process.resume()
        assert isinstance(session.outcome(1), Committed)
        found = manifest(member.url, Version(1, 1))
        assert found is not None
        assert encode(found) == expected_manifest(member)
        assert provers(own_daemon.process.pid) == []


def test_a_daemon_whose_prover_is_killed_commits_all_the_same(own_daemon: DaemonProcess, member: Member) -> None:
    with trainer(own_daemon.socket, member) as session:
        session.save(1, 5000)
        begun_prover(own_daemon).kill()
        put_file(replace(member, rank=FEW - 1))
        assert isinstance(session.outcome(1), Committed)
    found = manifest(member.url, Version(1, 1))
    assert found is not None
    assert encode(found) == expected_manifest(member)
    assert "ended with status -9" in own_daemon.log.read_text()


def test_a_prover_dies_with_its_daemon(own_daemon: DaemonProcess, member: Member) -> None:
    with trainer(own_daemon.socket, member) as session:
        session.save(1, 5000)
        process = begun_prover(own_daemon)
        os.kill(own_daemon.process.pid, signal.SIGKILL)
        process.wait(20)


# Reading


async def test_a_restore_proves_many_receipts_in_a_process_too(
    store: Backend, receipts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    async def start(count: int, **options: bool) -> proofs.Prover:
        found = await start_prover(count, **options)
        begun.extend(process.pid for process in provers(os.getpid()))
        return found

    monkeypatch.setattr(proofs, "start_prover", start)
    await put_receipts(store, receipts, list(range(MANY.ranks)))
    await commit_at(store, MANY.ranks).run()
    run = await Run.open(store)
    async with await CheckpointReader.open(run, VERSION) as reader:
        assert await check_proof(reader) == f"{MANY.ranks} receipts cover every tensor exactly once"
        assert len(begun) == 1
        damaged = msgspec.structs.replace(reader.manifest, metrics={"loss": 0.25})
        with pytest.raises(IntegrityError, match="differs from what its receipts prove"):
            await check_proof(CheckpointReader(run, damaged))
    assert provers(os.getpid()) == []
