"""Several ranks: one daemon for all, or one each, which meet in the storage only."""

from __future__ import annotations

import contextlib
import random
import resource
import time
from collections.abc import Generator
from pathlib import Path

from ckptd.errors import IntegrityError
from ckptd.format.keys import Version, manifest_key
from ckptd.wire import messages
from ckptd.wire.messages import Committed, Durable, Failed
from devtools.processes import wait_until
from tests.daemon.stored import check_committed, manifest, run_folder
from tests.daemon.trainer import DaemonProcess, Member, Trainer, daemon_at, trainer

QUICK = ("--commit-takeover", "0.3")


@contextlib.contextmanager
def trainers(daemons: list[DaemonProcess], url: str, world: int, *, keep_last: int = 100) -> Generator[list[Trainer]]:
    """Rank r at daemon r, or all at the only one."""
    with contextlib.ExitStack() as stack:
        members = [Member(url, rank=rank, world=world, keep_last=keep_last) for rank in range(world)]
        yield [stack.enter_context(trainer(daemons[member.rank % len(daemons)].socket, member)) for member in members]


def sibling(socket_path: Path, number: int) -> Path:
    return socket_path.with_name(f"d{number}.sock")


def test_r73_four_ranks_finish_at_random_times(daemon: DaemonProcess, tmp_run: str) -> None:
    with trainers([daemon], tmp_run, 4) as sessions:
        for step in (1, 2, 3):
            for session in random.sample(sessions, 4):
                session.save(step)
                time.sleep(random.uniform(0, 0.02))
        for step in (1, 2, 3):
            for session in sessions:
                assert isinstance(session.outcome(step), Committed)
            found = check_committed(sessions[0].member, step)
            assert [ref.rank for ref in found.receipts] == [0, 1, 2, 3]


def test_r127_three_quick_saves_on_three_ranks(daemon: DaemonProcess, tmp_run: str) -> None:
    with trainers([daemon], tmp_run, 3) as sessions:
        for step in (1, 2, 3):
            for session in sessions:
                if step > 2:
                    session.expect(Durable)  # two slots: each rank waits for its own, and is told
                session.save(step)
        for session in sessions:
            for step in (1, 2, 3):
                assert isinstance(session.outcome(step), Committed)


def test_two_daemons_commit_together(socket_path: Path, tmp_run: str) -> None:
    with (
        daemon_at(sibling(socket_path, 0), *QUICK) as first,
        daemon_at(sibling(socket_path, 1), *QUICK, "--drain", "0.5") as second,
        trainers([first, second], tmp_run, 2) as (zero, one),
    ):
        one.durable(one.save(1))
        zero.save(1)
        assert isinstance(zero.outcome(1), Committed)
        assert isinstance(one.outcome(1), Committed)
        check_committed(zero.member, 1)

        # Rank 0's daemon dies before the manifest: the other one does it.
        zero.durable(zero.save(2))
        first.kill()
        assert manifest(tmp_run, Version(2, 1)) is None
        one.save(2)
        assert isinstance(one.outcome(2), Committed)
        check_committed(zero.member, 2)

        # Not even rank 0's receipt: nobody commits, and the one that waits says for whom.
        one.durable(one.save(3))
        assert second.terminate() == 12
        assert "000000000003-g000001 of rank 1 (commit)" in second.log.read_text()
        assert manifest(tmp_run, Version(3, 1)) is None


def test_a_rank_that_never_comes_is_named(socket_path: Path, tmp_run: str) -> None:
    with (
        daemon_at(socket_path, "--commit-deadline", "0.5") as daemon,
        trainer(daemon.socket, Member(tmp_run, rank=0, world=3)) as zero,
        trainer(daemon.socket, Member(tmp_run, rank=2, world=3)) as two,
    ):
        zero.save(1)
        two.save(1)
        for session in (zero, two):
            failed = session.outcome(1)
            assert isinstance(failed, Failed)
            assert (failed.error, failed.stage) == ("DeadlineExceeded", "commit")
            assert "no receipt of rank 1" in failed.message


def test_r66_both_ranks_learn_that_one_could_not_write(socket_path: Path, tmp_run: str) -> None:
    with (
        daemon_at(sibling(socket_path, 0), *QUICK) as first,
        daemon_at(sibling(socket_path, 1), *QUICK) as second,
        trainers([first, second], tmp_run, 2) as (zero, one),
    ):
        # As with a full disk, records still fit where a shard does not.
        resource.prlimit(second.process.pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        zero.save(1)
        one.save(1)
        failed = one.outcome(1)
        assert isinstance(failed, Failed)
        assert failed.stage == "write"
        assert "rank-00001" in failed.message
        other = zero.outcome(1)
        assert isinstance(other, Failed)
        assert other.error == "SaveSkipped"
        assert "rank 1" in other.message
        assert manifest(tmp_run, Version(1, 1)) is None
        assert list(run_folder(tmp_run).rglob("*rank-00001*.safetensors")) == []
        # Training went on; there is room again.
        resource.prlimit(second.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        zero.save(2)
        one.save(2)
        assert isinstance(zero.outcome(2), Committed)
        assert isinstance(one.outcome(2), Committed)
        check_committed(zero.member, 2)


def test_a_manifest_of_other_bytes_is_a_conflict(daemon: DaemonProcess, tmp_run: str) -> None:
    path = run_folder(tmp_run) / manifest_key(Version(1, 1))
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with trainer(daemon.socket, Member(tmp_run)) as session:
        session.save(1)
        failed = session.outcome(1)
        assert isinstance(failed, Failed)
        assert isinstance(messages.as_error(failed), IntegrityError)
        assert path.read_text() == "{}"


def test_only_the_last_checkpoints_are_kept(daemon: DaemonProcess, tmp_run: str) -> None:
    with trainers([daemon], tmp_run, 2, keep_last=5) as sessions:
        for step in range(1, 9):
            for session in sessions:
                session.save(step)
            for session in sessions:
                assert isinstance(session.outcome(step), Committed)
        folder = run_folder(tmp_run) / "manifests"
        wait_until(lambda: len(list(folder.iterdir())) == 5, "retention", deadline_seconds=10)
        for step in range(4, 9):
            check_committed(sessions[0].member, step)
        wait_until(
            lambda: (
                len(list((run_folder(tmp_run) / "checkpoints").glob("*/*"))) == 5 * 5
            ),  # two shards, two receipts and what is common
            "deletion of the data",
            deadline_seconds=10,
        )
