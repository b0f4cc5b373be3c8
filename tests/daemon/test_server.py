"""The daemon's own life: who may start, who may connect, what it says, how it ends."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ckptd.errors import AccessDenied, DaemonError, ResourceError
from ckptd.format.keys import Version
from ckptd.limits import MESSAGE_BYTES_MAX
from ckptd.wire import channel, messages
from ckptd.wire.messages import Committed, Drain, GetStatus, Hello, Refused, TierOfRun
from devtools.processes import wait_until
from tests.daemon.stored import check_committed, manifest
from tests.daemon.trainer import DaemonProcess, Member, Trainer, connect, daemon_at, trainer

NOBODY = 65534
SIZE = 900_000
PARTS = {"part_bytes": 65536}


def test_r146_of_four_that_start_at_once_one_serves(socket_path: Path, tmp_run: str) -> None:
    channel.prepare_folder(socket_path)
    # What a daemon that was killed leaves behind.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(socket_path))
    four = [DaemonProcess(socket_path) for _ in range(4)]
    try:
        wait_until(
            lambda: sum(daemon.process.poll() is None for daemon in four) == 1, "one of four", deadline_seconds=20
        )
        assert sorted(str(daemon.process.poll()) for daemon in four) == ["0", "0", "0", "None"]
        (serving,) = [daemon for daemon in four if daemon.process.poll() is None]
        serving.wait_for()
        member = Member(tmp_run)
        with trainer(socket_path, member) as session:
            session.save(1)
            session.expect(Committed)
            assert session.status()["pid"] == serving.process.pid
        assert serving.terminate() == 0
        assert not socket_path.exists()
    finally:
        for daemon in four:
            daemon.kill()


def test_r146_what_is_no_socket_is_left_alone(socket_path: Path) -> None:
    channel.prepare_folder(socket_path)
    socket_path.write_text("mine")
    daemon = DaemonProcess(socket_path)
    assert daemon.process.wait(20) == AccessDenied.exit_code
    assert "is no socket" in daemon.log.read_text()
    assert socket_path.read_text() == "mine"


@pytest.mark.parametrize("squatted", ["open folder", "link", "foreign folder"])
def test_r171_a_place_that_others_can_reach_is_refused(socket_path: Path, squatted: str, tmp_path: Path) -> None:
    folder = socket_path.parent
    if squatted == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir()
        folder.chmod(0o777 if squatted == "open folder" else 0o700)
        if squatted == "foreign folder":
            os.chown(folder, NOBODY, NOBODY)
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.daemon", "--socket", socket_path], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == AccessDenied.exit_code
    assert "--socket" in done.stderr


OTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(10)
connection.connect(sys.argv[1])
connection.send(b'{"type":"get_status"}')
print(connection.recv(100000).decode())
"""


def _as_nobody(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", OTHER_USER, path], capture_output=True, text=True, timeout=30)


def test_r171_another_user_gets_no_further_than_the_folder(socket_path: Path) -> None:
    previous = os.umask(0)
    try:
        with daemon_at(socket_path) as daemon:
            assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
            os.chmod(socket_path.parent.parent, 0o711)
            done = _as_nobody(socket_path)
            assert "PermissionError" in done.stderr
            # And where someone opens the door, the kernel's word on the peer decides.
            os.chmod(socket_path.parent, 0o711)
            os.chmod(socket_path, 0o666)
            done = _as_nobody(socket_path)
            assert '"error":"AccessDenied"' in done.stdout
            assert '"status"' not in done.stdout
            assert f"uid {NOBODY}" in daemon.log.read_text()
    finally:
        os.umask(previous)


def test_r171_a_user_who_is_allowed_may_connect(socket_path: Path) -> None:
    with daemon_at(socket_path, "--allow-uid", str(NOBODY), mode=0o711):
        os.chmod(socket_path.parent.parent, 0o711)
        done = _as_nobody(socket_path)
        assert '"type":"status"' in done.stdout, done.stderr


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"{}",
        b'{"type":"launch_missiles"}',
        b'{"type":"sealed","at":{"arena":"x","slot":99,"ticket":1}}',
        b'{"type":"make_arena","request":1,"slots":2,"slot_bytes":4096}',  # before a Hello
        b'{"type":"hello","request":-1}',
        b'{"type":"drain","deadline_seconds":"soon"}',
        b"[" * 100_000,
        b" " * (MESSAGE_BYTES_MAX + 1),
    ],
    ids=lambda data: data[:30].decode(),
)
def test_r172_a_message_that_makes_no_sense_ends_that_client_only(
    daemon: DaemonProcess, tmp_run: str, data: bytes
) -> None:
    with trainer(daemon.socket, Member(tmp_run), slots=0) as bystander, connect(daemon.socket) as hostile:
        hostile.settimeout(20)
        hostile.send(data)
        reply = messages.decode_outgoing(channel.receive(hostile)[0])
        assert isinstance(reply, Refused)
        assert reply.error == "ProtocolError"
        assert channel.receive(hostile)[0] == b""
        bystander.await_idle()


def test_r172_descriptors_that_nobody_asked_for_are_closed(daemon: DaemonProcess, tmp_run: str) -> None:
    def open_files() -> int:
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    with trainer(daemon.socket, Member(tmp_run), slots=0):
        before = open_files()
        for count in (1, 2, 3):
            with connect(daemon.socket) as hostile:
                hostile.settimeout(20)
                fds = [os.memfd_create("unasked", os.MFD_CLOEXEC) for _ in range(count)]
                socket.send_fds(hostile, [messages.encode(GetStatus(request=1))], fds)
                for fd in fds:
                    os.close(fd)
                assert isinstance(messages.decode_outgoing(channel.receive(hostile)[0]), Refused)
        wait_until(lambda: open_files() <= before, "the descriptors to go", deadline_seconds=10)


def test_a_client_that_does_not_read_is_disconnected(daemon: DaemonProcess, tmp_run: str) -> None:
    with trainer(daemon.socket, Member(tmp_run), slots=0) as bystander, connect(daemon.socket) as deaf:
        deaf.settimeout(20)

        def ask_for_ever() -> None:
            while True:
                deaf.send(messages.encode(GetStatus(request=1)))

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask_for_ever()
        bystander.await_idle()


def test_another_protocol_version_says_what_to_do(daemon: DaemonProcess) -> None:
    hello = Hello(request=1, protocol=99, tiers=(TierOfRun(url="file:///x"),), rank=0, world=1, launch="l")
    with connect(daemon.socket) as connection:
        connection.settimeout(20)
        connection.send(messages.encode(hello))
        reply = messages.decode_outgoing(channel.receive(connection)[0])
        assert isinstance(reply, Refused)
        assert "protocol 99" in reply.message
        assert "drain" in reply.hint


def test_an_arena_that_does_not_fit_is_refused_with_figures(socket_path: Path, tmp_run: str) -> None:
    with (
        daemon_at(socket_path, "--memory-budget", "4") as daemon,
        trainer(daemon.socket, Member(tmp_run), slots=1) as session,
        trainer(daemon.socket, Member(f"{tmp_run}-2"), slots=0) as other,
    ):
        with pytest.raises(ResourceError, match=r"arena of 8\.\d MB does not fit: 3\.\d MB are left"):
            session.make_arena(1, 8 << 20)
        with pytest.raises(ResourceError, match="TB does not fit"):
            session.make_arena(2, 1 << 40)
        session.save(1)
        session.expect(Committed)
        with pytest.raises(ResourceError):  # a living session's arena is its own, whatever is in it
            other.make_arena(3, 1 << 20)


def test_a_closed_session_leaves_its_room_when_all_is_durable(socket_path: Path, tmp_run: str) -> None:
    """Its process lives on, as with the second Checkpointer of a process, or the second cell of a notebook."""
    with daemon_at(socket_path, "--memory-budget", "4") as daemon:
        with trainer(daemon.socket, Member(tmp_run), slots=1) as session:
            session.save(1)
            session.expect(Committed)
        with trainer(daemon.socket, Member(tmp_run, launch="launch#1"), slots=0) as session:
            assert len(session.status()["arenas"]["listed"]) == 1  # to restore from, as long as nobody needs the room
            session.make_arena(3, 1 << 20)
            session.begin(session.member.content(2))
        with (
            trainer(daemon.socket, Member(f"{tmp_run}-2"), slots=0) as session,
            pytest.raises(ResourceError, match="does not fit"),  # of what is not durable nothing is taken
        ):
            session.make_arena(1, 2 << 20)


def test_status_says_what_is_going_on_and_no_secrets(socket_path: Path, tmp_run: str) -> None:
    options = {"part_bytes": 65536}
    with (
        daemon_at(socket_path, "--bandwidth", "1") as daemon,
        trainer(daemon.socket, Member(tmp_run, storage_options=options)) as session,
    ):
        assert session.arena is not None
        pulse = session.watched()
        pulse.step(41)
        session.save(40, SIZE)
        session.wait_for_stage(Version(40, 1), "write")

        def progress() -> tuple[int, int]:
            (save,) = session.status()["saves"]["listed"]
            assert save["progress_age_seconds"] >= 0
            return save["bytes_done"], save["bytes"]

        wait_until(lambda: progress()[0] >= 131072, "progress", deadline_seconds=20)
        done, total = progress()
        assert done < total == len(session.member.content(40, SIZE).shard)
        status = session.status()
        (seen,) = status["sessions"]["listed"]
        assert (seen["run"], seen["rank"], seen["pid"]) == (tmp_run, 0, os.getpid())
        assert (seen["beat"]["step"], seen["beat"]["phase"]) == (41, "step")
        assert status["pid"] == daemon.process.pid
        assert "part_bytes" not in msgspec.json.encode(status).decode()  # nothing of the options shows
        session.expect(Committed)
        after = session.status()
        assert after["committed"] == {tmp_run: "000000000040-g000001"}
        assert after["arenas"]["listed"][0]["slots"] == ["durable", "free"]
        assert after["counts"]["committed"] == 1


def test_sigterm_finishes_what_is_under_way(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run, storage_options=PARTS)
    with daemon_at(socket_path, "--bandwidth", "1") as daemon, trainer(daemon.socket, member) as session:
        session.save(1, SIZE)
        session.wait_for_stage(Version(1, 1), "write")
        daemon.process.terminate()
        # What is sealed now stays in the arena for the next daemon.
        wait_until(lambda: session.status()["draining"], "the drain", deadline_seconds=10)
        at = session.save(2, SIZE)
        late = Trainer(socket_path, Member(f"{tmp_run}-2"))
        with pytest.raises(DaemonError, match="draining"):
            late.hello()
        late.close()
        assert isinstance(session.outcome(1), Committed)
        assert daemon.process.wait(20) == 0
        check_committed(member, 1, size=SIZE)
        assert manifest(tmp_run, Version(2, 1)) is None
        arena = session.arena
        assert arena is not None
        assert arena.record(at.slot).state.name == "SEALED"
        with daemon_at(socket_path) as second:
            again = Trainer(second.socket, member)
            again.hello()
            again.hand_arena(arena)
            assert isinstance(again.outcome(2), Committed)
            again.close()


def test_a_drain_that_takes_too_long_says_what_is_lost(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run, rank=0, world=2)
    with daemon_at(socket_path, "--drain", "0.3") as daemon, trainer(daemon.socket, member) as session:
        session.durable(session.save(1))
        assert daemon.terminate() == 12
        assert "000000000001-g000001 of rank 0 (commit)" in daemon.log.read_text()


def test_a_second_signal_ends_at_once(socket_path: Path, tmp_run: str) -> None:
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, Member(tmp_run, rank=0, world=2)) as session:
        session.durable(session.save(1))
        daemon.process.terminate()
        wait_until(lambda: session.status()["draining"], "the drain", deadline_seconds=10)
        assert daemon.terminate() == 130


def test_a_client_can_ask_for_the_drain(socket_path: Path, tmp_run: str) -> None:
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, Member(tmp_run, world=2)) as session:
        session.durable(session.save(1))
        with connect(socket_path) as operator:
            operator.settimeout(20)
            operator.send(messages.encode(Drain(request=1, deadline_seconds=0.2)))
            reply = messages.decode_outgoing(channel.receive(operator)[0])
            assert isinstance(reply, Refused)
            assert (reply.request, reply.error) == (1, "DeadlineExceeded")
        assert daemon.process.wait(20) == 0


def test_an_idle_daemon_goes_away(socket_path: Path, tmp_run: str) -> None:
    with daemon_at(socket_path, "--idle-exit", "0.5") as daemon:
        with trainer(daemon.socket, Member(tmp_run)) as session:
            session.save(1)
            session.expect(Committed)
            time.sleep(1.2)  # a client, even a silent one, keeps it
            session.await_idle()
        assert daemon.process.wait(20) == 0
        assert not socket_path.exists()


def test_a_daemon_whose_socket_is_removed_ends_with_its_last_client(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run)
    with daemon_at(socket_path) as daemon:
        with trainer(daemon.socket, member) as session:
            socket_path.unlink()
            session.save(1)
            session.expect(Committed)
        assert daemon.process.wait(20) == 0
        check_committed(member, 1)
