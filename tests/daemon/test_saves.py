"""One daemon that lives, a real socket, a real disk: what becomes of a snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.arena import SlotState
from ckptd.errors import DeadlineExceeded, UsageError
from ckptd.format.keys import Version, generation_key
from ckptd.format.records import GenerationRecord, Run, Skipped, decode, encode
from ckptd.wire import messages
from ckptd.wire.messages import Committed, Failed, Filled, Sealed, SlotRef
from devtools.processes import wait_until
from tests.daemon.stored import check_committed, manifest, receipt, run_folder
from tests.daemon.trainer import RUN, DaemonProcess, Member, Trainer, trainer

PARTS = {"part_bytes": 65536}


def test_a_save_becomes_durable_and_committed(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member) as session:
        at = session.save(10)
        durable = session.durable(at)
        assert set(durable.stats) == {"queue_seconds", "write_seconds", "bytes", "referenced_bytes", "path"}
        assert session.expect(Committed).step == 10
        check_committed(member, 10)
        assert session.arena is not None
        assert session.arena.record(at.slot).state is SlotState.DURABLE
        session.save(20)
        session.await_idle()
        check_committed(member, 20)


def test_parts_leave_while_the_slot_fills(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run, storage_options=PARTS)
    with trainer(daemon.socket, member) as session:
        content = member.content(1)
        at = session.begin(content)
        session.copy(at, content, 0, 200_000)
        # No part beyond what is final may be taken: the rest of the slot is still zeros, and would show.
        session.copy(at, content, 200_000, len(content.shard))
        with pytest.raises(DeadlineExceeded, match="write"):
            session.await_idle(0.2)
        assert receipt(tmp_run, content.version, 0, 1) is None
        session.seal(at)
        session.expect(Committed)
        check_committed(member, 1)


def test_r126_a_slot_is_free_only_when_its_save_is_durable(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member, slots=2) as session:
        assert session.arena is not None
        for step in range(1, 9):
            session.save(step)  # waits for a slot that the daemon has given back
        session.await_idle()
        for step in range(1, 9):
            check_committed(member, step)


def test_r126_a_slot_that_is_overwritten_too_early_is_noticed(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member, slots=1) as session:
        first = member.content(1)
        at = session.begin(first)
        session.copy(at, first, 0, 100_000)
        session.wait_for_stage(first.version, "write")
        second = member.content(2)
        again = session.begin(second, slot=at.slot)
        failed = session.expect(Failed, step=1)
        assert failed.error == "SnapshotVoided"
        session.copy(again, second, 0, len(second.shard))
        session.seal(again)
        session.expect(Committed, step=2)
        assert manifest(tmp_run, first.version) is None
        check_committed(member, 2)


def test_what_is_voided_never_shows(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member) as session:
        content = member.content(5)
        at = session.begin(content)
        session.copy(at, content, 0, len(content.shard))
        session.void(at, "model/w changed while it was copied")
        failed = session.outcome(5)
        assert isinstance(failed, Failed)
        assert failed.message == "model/w changed while it was copied"
        session.await_idle()
        assert manifest(tmp_run, content.version) is None
        told = receipt(tmp_run, content.version, 0, 1)
        assert told is not None
        assert "model/w" in decode(told, Skipped).reason
        assert list(run_folder(tmp_run).rglob("*.safetensors")) == []
        session.save(6)
        session.expect(Committed, step=6)
        check_committed(member, 6)


def test_r135_messages_of_an_earlier_fill_are_dropped(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member, slots=1) as session:
        old = session.save(1)
        session.expect(Committed)
        content = member.content(2)
        at = session.begin(content)
        # As if they had been queued by a life before: for the old ticket, an arena that is gone, a slot that is not.
        session.tell(Sealed(at=old))
        session.tell(Filled(at=old, bytes=len(content.shard)))
        session.tell(Sealed(at=SlotRef(arena="0" * 32, slot=0, ticket=at.ticket)))
        session.tell(Sealed(at=SlotRef(arena=at.arena, slot=7, ticket=at.ticket)))
        session.tell(Sealed(at=at))  # a lie: the slot's record says that it is being filled
        with pytest.raises(DeadlineExceeded):
            session.await_idle(0.2)
        assert manifest(tmp_run, content.version) is None
        session.copy(at, content, 0, len(content.shard))
        session.seal(at)
        session.expect(Committed, step=2)
        check_committed(member, 2)


def test_a_skipped_step_is_let_go_by_all(daemon: DaemonProcess, tmp_run: str) -> None:
    ranks = [Member(tmp_run, rank=rank, world=2) for rank in (0, 1)]
    with trainer(daemon.socket, ranks[0]) as zero, trainer(daemon.socket, ranks[1]) as one:
        zero.durable(zero.save(3))
        one.skip(3, "no free slot")
        failed = zero.outcome(3)
        assert isinstance(failed, Failed)
        assert (failed.error, failed.stage) == ("SaveSkipped", "commit")
        assert "rank 1" in failed.message
        assert "no free slot" in failed.message
        wait_until(lambda: receipt(tmp_run, Version(3, 1), 1, 2) is not None, "the record", deadline_seconds=10)
        data = receipt(tmp_run, Version(3, 1), 1, 2)
        assert data is not None
        assert decode(data, Skipped).reason == "no free slot"
        # Whoever comes later learns it as well.
        one.save(3)
        late = one.outcome(3)
        assert isinstance(late, Failed)
        assert late.error == "SaveSkipped"
        assert manifest(tmp_run, Version(3, 1)) is None


def test_the_same_step_twice_is_saved_once(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member) as session:
        session.save(4)
        session.expect(Committed)
        session.save(4)
        session.expect(Committed)
        check_committed(member, 4)
        # Other bytes under the same name are refused, and change nothing.
        other = member.content(4, salt=1)
        at = session.begin(other)
        session.copy(at, other, 0, len(other.shard))
        session.seal(at)
        failed = session.outcome(4)
        assert isinstance(failed, Failed)
        assert failed.error == "SaveError"
        session.await_idle()
        check_committed(member, 4)


def test_r77_an_older_generation_is_told_who_took_the_run(daemon: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run)
    with trainer(daemon.socket, member) as session:
        session.save(1)
        session.expect(Committed)
        newer = GenerationRecord(
            generation=2, host="other-host", launch="other#0", opened_from=None, pid=77, run=RUN, world=1
        )
        path = run_folder(tmp_run) / generation_key(2)
        path.parent.mkdir()
        path.write_bytes(encode(newer))
        session.save(2)
        failed = session.outcome(2)
        assert isinstance(failed, Failed)
        assert failed.error == "Superseded"
        assert "other-host" in failed.message
        assert "process 77" in failed.message
        session.await_idle()
        assert manifest(tmp_run, Version(2, 1)) is None
        check_committed(member, 1)  # and nothing is deleted


def test_a_store_that_cannot_be_opened_is_an_error_with_a_name(daemon: DaemonProcess, tmp_path: Path) -> None:
    session = Trainer(daemon.socket, Member(f"file://{tmp_path}", storage_options={"colour": "red"}))
    with pytest.raises(UsageError, match="colour"):
        session.hello()
    session.close()


def test_a_save_that_fails_frees_its_slot_and_the_next_one_works(daemon: DaemonProcess, tmp_path: Path) -> None:
    root = tmp_path / "run"
    member = Member(f"file://{root}")
    with trainer(daemon.socket, member) as session:
        root.rename(tmp_path / "elsewhere")
        root.write_text("a file where a folder should be")
        at = session.save(1)
        failed = session.outcome(1)
        assert isinstance(failed, Failed)
        assert failed.stage == "write"
        assert "run" in messages.as_error(failed).message
        assert session.arena is not None
        assert session.arena.record(at.slot).state is SlotState.FREE
        root.unlink()
        (tmp_path / "elsewhere").rename(root)
        session.save(2)
        session.expect(Committed, step=2)
        check_committed(member, 2)


def test_a_run_whose_root_has_gone_is_not_saved_to_another(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Deleted, unmounted, or another run's by now: nothing is written there, and nothing counts as committed."""
    root, away = tmp_path / "run", tmp_path / "away"
    member = Member(f"file://{root}")
    with trainer(daemon.socket, member) as session:
        session.save(1)
        session.expect(Committed, step=1)
        root.rename(away)
        for step, said in (
            (2, "run.json is missing"),
            (3, "run.json is of run theirs, and this save is of run testrun"),
        ):
            session.save(step)
            failed = messages.as_error(session.expect(Failed, step=step))
            assert said in failed.message
            assert "bring" in failed.hint
            session.await_idle()
            assert [path.name for path in root.rglob("*")] == ([] if step == 2 else ["run.json"])
            root.mkdir(exist_ok=True)
            (root / "run.json").write_bytes(encode(Run(run="theirs")))
        (root / "run.json").unlink()
        root.rmdir()
        away.rename(root)
        session.save(4)
        session.expect(Committed, step=4)
        check_committed(member, 4)


def test_a_root_that_goes_before_the_commit_gets_no_manifest(daemon: DaemonProcess, tmp_run: str) -> None:
    ranks = [Member(tmp_run, rank=rank, world=2) for rank in (0, 1)]
    with trainer(daemon.socket, ranks[0]) as zero, trainer(daemon.socket, ranks[1]) as one:
        content = one.member.content(1)
        at = one.begin(content)  # its upload has begun, and so is past the first look
        one.copy(at, content, 0, 1000)
        one.wait_for_stage(Version(1, 1), "write")
        zero.durable(zero.save(1))
        wait_until(lambda: any(run_folder(tmp_run).rglob("~ckptd-*")), "the upload", deadline_seconds=20)
        (run_folder(tmp_run) / "run.json").unlink()
        one.copy(at, content, 1000, len(content.shard))
        one.seal(at)
        for session in (zero, one):
            failed = session.outcome(1)
            assert isinstance(failed, Failed)
            assert failed.error in ("SaveError", "StorageError")
            assert "run.json" in failed.message
        assert manifest(tmp_run, Version(1, 1)) is None
