"""Several tiers: committed on the nearest, copied on in the background, whatever dies or does not answer meanwhile."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptd.daemon.tier import Interval
from ckptd.format.keys import Version, manifest_key
from ckptd.format.records import Parent
from ckptd.limits import EXCHANGED_KEPT
from ckptd.wire.messages import Committed, Failed
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint, SeaweedFS
from tests.daemon.stored import check_committed, run_folder
from tests.daemon.trainer import DaemonProcess, Member, Trainer, daemon_at, trainer
from tests.servers.proxied import raw_client

SIZE = 9 << 20
"""Several parts, so that a copy can be caught in the middle."""
ROOM = SIZE + (1 << 20)


def local_tiers(folder: Path, **options: Any) -> Member:
    return Member(f"file://{folder / 'near'}", far_url=f"file://{folder / 'far'}", **options)


def committed_at(url: str) -> set[int]:
    """Steps that have a manifest in a folder."""
    return {int(path.name[:12]) for path in run_folder(url).glob("manifests/*.json")}


def far(member: Member) -> Member:
    """The member as if the further tier were all there is."""
    return replace(member, url=member.far_url)


def wait_for_copy(member: Member, step: int) -> None:
    wait_until(lambda: step in committed_at(member.far_url), f"step {step} further out", deadline_seconds=20)


def tier_of(session: Trainer) -> dict[str, Any]:
    """Its own: what an earlier test has left at a root that is gone may still be listed."""
    listed = session.status()["tiers"]["listed"]
    (found,) = [tier for tier in listed if session.member.far_url in tier.values()]
    return found


def test_a_copy_is_the_same_checkpoint(daemon: DaemonProcess, tmp_path: Path) -> None:
    member = local_tiers(tmp_path)
    with trainer(daemon.socket, member, slot_bytes=ROOM) as session:
        session.save(1, SIZE)
        assert isinstance(session.outcome(1), Committed)
        wait_for_copy(member, 1)
        check_committed(member, 1, size=SIZE)
        check_committed(far(member), 1, size=SIZE)
        near, further = run_folder(member.url), run_folder(member.far_url)
        for path in [*near.glob("checkpoints/**/*"), *near.glob("manifests/*"), *near.glob("generations/*")]:
            if path.is_file():
                assert path.read_bytes() == (further / path.relative_to(near)).read_bytes()
        wait_until(lambda: tier_of(session)["state"] == "idle", "the link to rest", deadline_seconds=10)
        found = tier_of(session)
        assert (found["committed"], found["behind_steps"]) == (str(Version(1, 1)), 0)
        assert (found["error"], found["bytes"]) == ("", found["bytes_done"])


def test_ranks_of_one_daemon_copy_together(daemon: DaemonProcess, tmp_path: Path) -> None:
    member = local_tiers(tmp_path, world=2)
    with trainer(daemon.socket, member) as first, trainer(daemon.socket, replace(member, rank=1)) as second:
        first.save(1)
        second.save(1)
        assert isinstance(first.outcome(1), Committed)
        wait_for_copy(member, 1)
        check_committed(far(member), 1)


def test_ranks_of_two_daemons_copy_what_rank_0s_has_chosen(socket_path: Path, tmp_path: Path) -> None:
    member = local_tiers(tmp_path, world=2)
    with (
        daemon_at(socket_path) as near,
        daemon_at(socket_path.with_name("e.sock")) as other,
        trainer(near.socket, member) as first,
        trainer(other.socket, replace(member, rank=1)) as second,
    ):
        for step in (1, 2):
            first.save(step)
            second.save(step)
            assert isinstance(first.outcome(step), Committed)
            wait_for_copy(member, step)
            check_committed(far(member), step)
        left = run_folder(member.url) / "tiers"
        wait_until(lambda: not list(left.rglob("*.json")), "the choice to be withdrawn", deadline_seconds=10)


def test_each_tier_has_its_own_interval_and_retention(daemon: DaemonProcess, tmp_path: Path) -> None:
    member = local_tiers(tmp_path, keep_last=2, far_every_steps=3, far_keep_last=2)
    with trainer(daemon.socket, member) as session:
        for step in range(1, 11):
            session.save(step)
            assert isinstance(session.outcome(step), Committed)
            if step == 1 or step % 3 == 0:
                wait_for_copy(member, step)
        wait_until(lambda: committed_at(member.far_url) == {6, 9}, "retention further out", deadline_seconds=10)
        wait_until(lambda: committed_at(member.url) == {9, 10}, "retention near", deadline_seconds=10)


def test_what_a_slow_tier_cannot_take_is_left_out_and_held_for_it(socket_path: Path, tmp_path: Path) -> None:
    """Ten saves in the time of one copy: the first and the last get there, and what is being copied stays near."""
    member = local_tiers(tmp_path, keep_last=1)
    with (
        daemon_at(socket_path, "--copy-bandwidth", "4") as daemon,
        trainer(daemon.socket, member, slot_bytes=ROOM) as session,
    ):
        session.save(1, SIZE)
        session.outcome(1)
        wait_until(lambda: tier_of(session)["state"] == "copying", "the copy", deadline_seconds=10)
        for step in range(2, 11):
            session.save(step)
            assert isinstance(session.outcome(step), Committed)
        assert tier_of(session)["copying"] == str(Version(1, 1))
        wait_until(lambda: committed_at(member.url) == {1, 10}, "retention near", deadline_seconds=10)
        wait_for_copy(member, 10)
        assert committed_at(member.far_url) == {1, 10}
        check_committed(far(member), 1, size=SIZE)
        wait_until(lambda: committed_at(member.url) == {10}, "retention near", deadline_seconds=10)


def test_a_daemon_killed_in_the_middle_of_a_copy_takes_it_up_again(socket_path: Path, tmp_path: Path) -> None:
    member = local_tiers(tmp_path)
    with (
        daemon_at(socket_path, "--copy-bandwidth", "2") as daemon,
        trainer(daemon.socket, member, slot_bytes=ROOM) as session,
    ):
        session.save(1, SIZE)
        assert isinstance(session.outcome(1), Committed)
        copying = (run_folder(member.far_url) / "checkpoints").rglob
        wait_until(lambda: any(copying("~*")), "a part of the shard", deadline_seconds=10)
        daemon.kill()
    assert committed_at(member.far_url) == set()
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, replace(member, launch="launch#1"), slots=0):
        wait_for_copy(member, 1)
        check_committed(far(member), 1, size=SIZE)


def test_a_drain_waits_for_the_copy_and_not_for_a_tier_that_fails(socket_path: Path, tmp_path: Path) -> None:
    member = local_tiers(tmp_path)
    with daemon_at(socket_path, "--copy-bandwidth", "8") as daemon:
        with trainer(daemon.socket, member, slot_bytes=ROOM) as session:
            session.save(1, SIZE)
            assert isinstance(session.outcome(1), Committed)
        assert daemon.terminate() == 0
    check_committed(far(member), 1, size=SIZE)
    member = replace(local_tiers(tmp_path / "second"), far_url=f"file://{tmp_path / 'later'}")
    with daemon_at(socket_path) as daemon:
        with trainer(daemon.socket, member) as session:
            (tmp_path / "later" / "run.json").unlink()
            (tmp_path / "later" / "manifests").write_text("no folder")
            session.save(1)
            assert isinstance(session.outcome(1), Committed)
            wait_until(lambda: tier_of(session)["state"] == "failing", "the tier to fail", deadline_seconds=10)
            assert session.status()["counts"]["copies_failed"] >= 1
        assert daemon.terminate() == 0


def test_rot_is_not_spread_and_the_older_one_stays(daemon: DaemonProcess, tmp_path: Path) -> None:
    member = local_tiers(tmp_path, far_every_steps=1)
    far_folder = run_folder(member.far_url)
    with trainer(daemon.socket, member) as session:
        session.save(1)
        session.outcome(1)
        wait_for_copy(member, 1)
        with _unreachable(far_folder):
            session.save(2)
            session.outcome(2)
            wait_until(lambda: tier_of(session)["failures"] >= 1, "the tier to fail", deadline_seconds=10)
            (shard,) = run_folder(member.url).glob(f"checkpoints/{Version(2, 1)}/*.safetensors")
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
        session.save(3)
        session.outcome(3)
        wait_for_copy(member, 3)
        assert 2 not in committed_at(member.far_url)
        (shard,) = run_folder(member.url).glob(f"checkpoints/{Version(3, 1)}/*.safetensors")
        check_committed(far(member), 3)


def test_a_rotten_newest_one_is_refused(socket_path: Path, tmp_path: Path) -> None:
    member = local_tiers(tmp_path)
    alone = replace(member, far_url="")
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, alone) as session:
        for step in (1, 2):
            session.save(step)
            session.outcome(step)
    (shard,) = run_folder(member.url).glob(f"checkpoints/{Version(2, 1)}/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, member, slots=0) as session:
        wait_for_copy(member, 1)  # the next older one is sound
        assert committed_at(member.far_url) == {1}
        assert "differ from their digest" in str(session.status()["failures"])


@contextlib.contextmanager
def _unreachable(folder: Path) -> Generator[None]:
    """A tier whose folder is something else for a while, as an unmounted disk's may be."""
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    folder.write_text("no folder")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


def s3_manifests(server: S3Endpoint, url: str) -> set[int]:
    """Steps that have a manifest in a bucket."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    with raw_client(server) as client:
        found = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/manifests/").get("Contents", [])
    return {int(item["Key"].rpartition("/")[2][:12]) for item in found}


def test_s3_that_is_down_for_some_saves_gets_the_newest_when_it_is_back(
    own_s3_server: SeaweedFS, socket_path: Path, tmp_path: Path
) -> None:
    server = own_s3_server
    member = Member(f"file://{tmp_path / 'near'}", far_url=server.prefix(), storage_options=server.options, keep_last=2)
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, member) as session:
        session.save(1)
        session.outcome(1)
        wait_until(lambda: s3_manifests(server, member.far_url) == {1}, "step 1 in S3", deadline_seconds=20)
        server.kill()
        for step in range(2, 7):
            session.save(step)
            assert isinstance(session.outcome(step), Committed)
        wait_until(lambda: tier_of(session)["failures"] >= 1, "a failure", deadline_seconds=90)
        found = tier_of(session)
        assert found["state"] in ("failing", "copying")
        assert found["behind_steps"] >= 1
        wait_until(lambda: {5, 6} == committed_at(member.url), "retention near", deadline_seconds=10)
        server.restart()
        wait_until(lambda: s3_manifests(server, member.far_url) == {1, 6}, "step 6 in S3", deadline_seconds=90)
        assert session.status()["counts"]["copies_failed"] >= 1


def nodes(folder: Path) -> tuple[Member, Member]:
    """Two ranks on two nodes, each with a disk of its own, and a place that both see."""
    shared = f"file://{folder / 'shared'}"
    return (
        Member(f"file://{folder / 'disk0'}", far_url=shared, world=2, shared=False),
        Member(f"file://{folder / 'disk1'}", far_url=shared, world=2, shared=False, rank=1),
    )


@contextlib.contextmanager
def two_nodes(socket_path: Path, folder: Path) -> Generator[tuple[tuple[Trainer, Member], tuple[Trainer, Member]]]:
    zero, one = nodes(folder)
    with (
        daemon_at(socket_path) as first,
        daemon_at(socket_path.with_name("e.sock")) as second,
        trainer(first.socket, zero) as at_zero,
        trainer(second.socket, one) as at_one,
    ):
        yield (at_zero, zero), (at_one, one)


def test_disks_of_nodes_are_one_tier(socket_path: Path, tmp_path: Path) -> None:
    """Each disk has its own shard and all records; the shared tier gets everything."""
    with two_nodes(socket_path, tmp_path) as ((at_zero, zero), (at_one, one)):
        at_zero.save(1)
        at_one.save(1)
        for session in (at_zero, at_one):
            assert isinstance(session.outcome(1), Committed)
        wait_for_copy(zero, 1)
        check_committed(far(zero), 1)
        manifests = {
            (run_folder(url) / manifest_key(Version(1, 1))).read_bytes() for url in (zero.url, one.url, zero.far_url)
        }
        assert len(manifests) == 1
        for member in (zero, one):
            folder = run_folder(member.url) / f"checkpoints/{Version(1, 1)}"
            names = sorted(path.name for path in folder.iterdir())
            assert len([name for name in names if name.startswith("rank-") and name.endswith(".json")]) == 2
            (shard,) = [name for name in names if name.endswith(".safetensors")]
            assert shard.startswith(f"rank-{member.rank:05d}-")


def test_a_node_that_gives_up_lets_the_other_go(socket_path: Path, tmp_path: Path) -> None:
    with two_nodes(socket_path, tmp_path) as ((at_zero, zero), (at_one, one)):
        at_zero.save(1)
        at_one.skip(1, "no slot")
        failed = at_zero.outcome(1)
        assert isinstance(failed, Failed)
        assert "rank 1 takes no part" in failed.message
        assert committed_at(zero.url) == committed_at(one.url) == set()


def test_a_node_killed_before_its_manifest_finishes_it_at_the_next_start(socket_path: Path, tmp_path: Path) -> None:
    zero, one = nodes(tmp_path)
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, zero) as at_zero:
        with daemon_at(socket_path.with_name("e.sock")) as other, trainer(other.socket, one) as at_one:
            at = at_one.save(1)
            at_one.durable(at)
            offered = run_folder(zero.far_url) / "tiers/0/checkpoints"
            wait_until(lambda: any(offered.rglob("*.json")), "the receipt for the others", deadline_seconds=10)
            other.kill()
        at_zero.save(1)
        assert isinstance(at_zero.outcome(1), Committed)
        assert committed_at(one.url) == set()
        with (
            daemon_at(socket_path.with_name("e.sock")) as other,
            trainer(other.socket, replace(one, launch="launch#1"), slots=0) as at_one,
        ):
            at_one.await_idle()
            assert committed_at(one.url) == {1}
            wait_for_copy(zero, 1)
            check_committed(far(zero), 1)


def test_a_lost_disk_is_said_and_the_next_checkpoint_gets_through(socket_path: Path, tmp_path: Path) -> None:
    zero, one = nodes(tmp_path)
    (tmp_path / "shared").mkdir()
    blocked = tmp_path / "shared" / "manifests"
    blocked.write_text("no folder")
    with two_nodes(socket_path, tmp_path) as ((at_zero, _), (at_one, _)):
        for session in (at_zero, at_one):
            session.save(1)
        for session in (at_zero, at_one):
            assert isinstance(session.outcome(1), Committed)
    blocked.unlink()
    shutil.rmtree(run_folder(one.url))  # the node is replaced by another one
    parent = Parent(generation=1, step=1)
    zero, one = (replace(member, launch="launch#1", generation=2, parent=parent) for member in (zero, one))
    with (
        daemon_at(socket_path) as first,
        daemon_at(socket_path.with_name("e.sock")) as second,
        trainer(first.socket, zero) as at_zero,
        trainer(second.socket, one) as at_one,
    ):
        reason = "has nothing of it"
        wait_until(lambda: reason in str(at_zero.status()["failures"]), "the refusal", deadline_seconds=20)
        for session in (at_zero, at_one):
            session.save(2)
        for session in (at_zero, at_one):
            assert isinstance(session.outcome(2), Committed)
        wait_for_copy(zero, 2)
        assert committed_at(zero.far_url) == {2}


def test_retention_on_disks_of_nodes_clears_what_was_exchanged(socket_path: Path, tmp_path: Path) -> None:
    zero, one = nodes(tmp_path)
    zero, one = (replace(member, keep_last=2, far_every_steps=100) for member in (zero, one))
    with (
        daemon_at(socket_path) as first,
        daemon_at(socket_path.with_name("e.sock")) as second,
        trainer(first.socket, zero) as at_zero,
        trainer(second.socket, one) as at_one,
    ):
        for step in range(1, EXCHANGED_KEPT + 6):
            for session in (at_zero, at_one):
                session.save(step)
            for session in (at_zero, at_one):
                assert isinstance(session.outcome(step), Committed)
        last = {EXCHANGED_KEPT + 4, EXCHANGED_KEPT + 5}
        wait_until(lambda: committed_at(zero.url) == committed_at(one.url) == last, "retention", deadline_seconds=10)
        exchanged = run_folder(zero.far_url) / "tiers/0/checkpoints"
        wait_until(lambda: len(list(exchanged.iterdir())) == EXCHANGED_KEPT + 2, "the rest to go", deadline_seconds=10)


def test_interval_takes_the_first_at_or_after_each_multiple() -> None:
    def line(*steps: int) -> list[Version]:
        return [Version(step, 1) for step in steps]

    def chosen(interval: Interval, near: list[Version], far: list[Version], *, time_is_up: bool = False) -> int | None:
        both = sorted({*near, *far}, reverse=True)
        found = interval.choose(both, set(near), set(far), time_is_up=time_is_up)
        return None if found is None else found.step

    each, hundred, timed = Interval(), Interval(every_steps=100), Interval(every_seconds=60)
    assert chosen(each, line(3, 2, 1), line(1)) == 3
    assert chosen(each, line(3, 2), line(3)) is None
    assert chosen(each, [], line(3)) is None
    assert chosen(hundred, line(30, 20, 10), []) == 10  # so that it does not stand empty for long
    assert chosen(hundred, line(90, 80), line(10)) is None
    assert chosen(hundred, line(130, 110, 90), line(10)) == 110
    assert chosen(hundred, line(330, 310, 210), line(10)) == 310  # what was overtaken is left out
    assert chosen(timed, line(3, 2), line(2)) is None
    assert chosen(timed, line(4, 3, 2), line(2), time_is_up=True) == 4
    # Further out lies what a run that went back has left: it is on no line, and does not count.
    went_back = [Version(60, 2), Version(50, 1)]
    assert each.choose(went_back, went_back[:1], {Version(99, 1)}, time_is_up=False) == went_back[0]
