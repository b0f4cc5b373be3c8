"""Trainers and daemons that are killed, with SIGKILL, at the moments that matter."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from ckptd.arena import SlotState
from ckptd.errors import DaemonError, FormatError, RunInUse, UsageError
from ckptd.format.keys import Version, manifest_key
from ckptd.wire.messages import Committed, Done, Durable, Failed, HandArena, Sealed, SlotRef
from devtools.processes import wait_until
from tests.daemon.stored import check_committed, manifest, run_folder
from tests.daemon.trainer import DaemonProcess, Member, Trainer, Victim, daemon_at, trainer

SLOW = ("--bandwidth", "1")
PARTS = {"part_bytes": 65536}
SIZE = 900_000
"""At 1 MiB/s this is under way for most of a second."""


def committed(member: Member, step: int) -> None:
    wait_until(
        lambda: manifest(member.url, Version(step, member.generation)) is not None,
        f"the commit of step {step}",
        deadline_seconds=20,
    )


def test_a_trainer_killed_after_the_seal_is_committed(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run, storage_options=PARTS)
    with daemon_at(socket_path, *SLOW) as daemon:
        victim = Victim(daemon.socket, member, [7], last="sealed", size=SIZE).wait_for()
        assert manifest(tmp_run, Version(7, 1)) is None
        victim.kill()
        assert manifest(tmp_run, Version(7, 1)) is None, "the kill came too late to show anything"
        committed(member, 7)
        check_committed(member, 7, size=SIZE)


def test_a_trainer_killed_while_filling_leaves_the_snapshot_before(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    victim = Victim(daemon.socket, member, [1, 2], last="filling").wait_for()
    victim.kill()
    committed(member, 1)
    successor = Trainer(daemon.socket, Member(tmp_run, generation=2, launch="launch#1"))
    successor.hello()
    (offer,) = successor.offers()
    assert (offer.step, offer.generation, offer.rank, offer.writable) == (1, 1, 0, True)
    arena = successor.borrow_arena(offer.arena)
    # The memory is that of the dead trainer, to read and to write.
    content = member.content(1)
    record = arena.record(offer.slot)
    assert bytes(arena.slot(offer.slot)[: record.shard_bytes]) == content.shard
    assert arena.doc(offer.slot, record) == content.doc
    assert [record.state for record in arena.records()] == [SlotState.DURABLE, SlotState.FREE]
    successor.save(3)
    successor.expect(Committed, step=3)
    check_committed(successor.member, 3)
    successor.close()
    check_committed(member, 1)
    assert manifest(tmp_run, Version(2, 1)) is None
    assert list(run_folder(tmp_run).glob("checkpoints/000000000002-*/*.safetensors")) == []


def test_r144_neither_death_takes_the_memory_from_the_other(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run, storage_options=PARTS)
    with daemon_at(socket_path, *SLOW) as first, trainer(first.socket, member) as session:
        session.save(1, SIZE)
        session.wait_for_stage(Version(1, 1), "write")
        first.kill()
        with pytest.raises(DaemonError):
            session.expect(Durable)
        # The daemon is dead; the trainer reads and writes on, and seals another snapshot meanwhile.
        arena = session.arena
        assert arena is not None
        assert bytes(arena.slot(0)[: arena.record(0).shard_bytes]) == member.content(1, SIZE).shard
        session.save(2, SIZE)
        with daemon_at(socket_path) as second:
            again = Trainer(second.socket, member)
            again.hello()
            assert again.offers() == ()
            again.hand_arena(arena)
            again.expect(Committed, step=1)
            again.expect(Committed, step=2)
            check_committed(member, 1, size=SIZE)
            check_committed(member, 2, size=SIZE)
            again.close()


def test_r134_a_new_daemon_goes_on_where_the_old_one_was_killed(socket_path: Path, tmp_run: str) -> None:
    """Idle, while it writes a slot that is still being filled, and before the commit."""
    members = [Member(tmp_run, rank=rank, world=2) for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemon_at(socket_path))
        zero = stack.enter_context(trainer(socket_path, members[0]))
        one = stack.enter_context(trainer(socket_path, members[1]))

        def replace_daemon() -> None:
            nonlocal daemon, zero, one
            daemon.kill()
            with pytest.raises(DaemonError):
                zero.expect(Failed)
            daemon = stack.enter_context(daemon_at(socket_path))
            zero, one = (stack.enter_context(reconnected(daemon, session)) for session in (zero, one))

        replace_daemon()  # idle
        content = members[0].content(1)
        at = zero.begin(content)
        zero.copy(at, content, 0, 100_000)
        zero.wait_for_stage(content.version, "write")
        replace_daemon()  # a slot is being filled
        zero.copy(at, content, 100_000, len(content.shard))
        zero.seal(at)
        zero.expect(Durable)
        replace_daemon()  # waiting for rank 1
        one.save(1)
        assert isinstance(zero.outcome(1), Committed)
        assert isinstance(one.outcome(1), Committed)
        check_committed(members[0], 1)


@contextlib.contextmanager
def reconnected(daemon: DaemonProcess, before: Trainer) -> Generator[Trainer]:
    """The same trainer, with its arena, at another daemon."""
    session = Trainer(daemon.socket, before.member)
    try:
        session.hello()
        assert before.arena is not None
        session.hand_arena(before.arena)
        yield session
    finally:
        session.close()


def test_r125_only_what_every_rank_has_is_committed(daemon: DaemonProcess, tmp_run: str) -> None:
    members = [Member(tmp_run, rank=rank, world=2) for rank in (0, 1)]
    zero = Victim(daemon.socket, members[0], [10, 11], last="sealed").wait_for()
    one = Victim(daemon.socket, members[1], [10, 11], last="filling").wait_for()
    one.kill()
    zero.kill()
    successors = [Member(tmp_run, rank=rank, world=2, generation=2, launch="launch#1") for rank in (0, 1)]
    with (
        trainer(daemon.socket, successors[0], slots=0) as first,
        trainer(daemon.socket, successors[1], slots=0) as second,
    ):
        first.await_idle()  # far sooner than a commit waits for a rank of which nothing is known
        second.await_idle()
    check_committed(members[0], 10)
    assert manifest(tmp_run, Version(11, 1)) is None


def test_all_receipts_but_no_manifest_is_finished_at_the_next_start(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run)
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, member) as session:
        session.save(5)
        session.expect(Committed)
    path = run_folder(tmp_run) / manifest_key(Version(5, 1))
    before = path.read_bytes()
    path.unlink()  # as if the daemon and the trainer had died just before
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, member, slots=0) as session:
        session.await_idle()
    assert path.read_bytes() == before


def test_r77_a_rank_has_one_living_owner(daemon: DaemonProcess, tmp_run: str) -> None:
    victim = Victim(daemon.socket, Member(tmp_run), [1, 2], last="filling").wait_for()
    try:
        late = Trainer(daemon.socket, Member(tmp_run))
        with pytest.raises(RunInUse, match=f"process {victim.trainer_pid} of launch launch#0"):
            late.hello()
        late.close()
        # With takeover it goes on beside the other one, whose memory it does not get.
        with trainer(daemon.socket, Member(tmp_run, generation=2, takeover=True)) as successor:
            arenas = successor.status()["arenas"]["listed"]
            (old,) = [arena["id"] for arena in arenas if arena["owner_pid"] == victim.trainer_pid]
            with pytest.raises(RunInUse, match="still mapped"):
                successor.borrow_arena(old)
            successor.save(3)
            successor.expect(Committed, step=3)
            check_committed(successor.member, 3)
    finally:
        victim.kill()


def test_r145_r172_a_descriptor_that_is_no_arena_harms_nobody(daemon: DaemonProcess, tmp_run: str) -> None:
    good = Member(tmp_run)
    with trainer(daemon.socket, good) as session, trainer(daemon.socket, Member(f"{tmp_run}-2"), slots=0) as other:
        assert session.arena is not None
        sealable = os.memfd_create("garbage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(sealable, 1 << 20)
        with pytest.raises(FormatError, match="not sealed"):  # it could be truncated under the daemon
            other.ask(HandArena(arena="0" * 32), Done, fd=sealable)
        fcntl.fcntl(sealable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(FormatError, match="not an arena"):
            other.ask(HandArena(arena="0" * 32), Done, fd=sealable)
        os.close(sealable)
        # Another seat's arena is not for the taking, whoever has its descriptor.
        with pytest.raises(UsageError, match="belongs to rank 0"):
            other.ask(HandArena(arena=session.arena.id), Done, fd=session.arena.fd)
        with pytest.raises(UsageError):
            other.borrow_arena(session.arena.id)
        session.save(1)
        session.expect(Committed)
        # Damaged records: the slot is lost, nothing else is.
        session.arena.view[4096 : 4096 + 512] = os.urandom(512)
        session.tell(Sealed(at=SlotRef(arena=session.arena.id, slot=0, ticket=9)))
        content = good.content(2)
        session.seal(session.begin(content, slot=1, torn=True))
        failed = session.expect(Failed, step=2)
        assert failed.error == "IntegrityError"
        (mine,) = [found for found in other.status()["arenas"]["listed"] if found["id"] == session.arena.id]
        assert mine["slots"] == ["free"]
