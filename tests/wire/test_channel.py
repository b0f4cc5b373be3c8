"""The channel: datagrams whole or not at all, no descriptor lost, and a folder that nobody else can be in."""

from __future__ import annotations

import array
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import AccessDenied, ConfigError, ProtocolError
from ckptd.limits import MESSAGE_BYTES_MAX
from ckptd.wire import channel
from ckptd.wire.channel import check_folder, default_socket, peer_of, prepare_folder, receive, send

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.settimeout(10)
    right.settimeout(10)
    yield left, right
    left.close()
    right.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_datagrams_arrive_one_by_one(pair: Pair) -> None:
    left, right = pair
    for data in (b"a", b"b" * 1000, b"c" * MESSAGE_BYTES_MAX):
        send(left, data)
    assert [receive(right) for _ in range(3)] == [(b"a", None), (b"b" * 1000, None), (b"c" * MESSAGE_BYTES_MAX, None)]


def test_a_descriptor_arrives_as_one_of_the_receivers_own(pair: Pair, tmp_path: Path) -> None:
    left, right = pair
    sent = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    send(left, b"here", sent)
    data, got = receive(right)
    assert data == b"here"
    assert got is not None
    assert got != sent
    assert os.path.samestat(os.fstat(got), os.fstat(sent))
    assert not os.get_inheritable(got)
    os.close(sent)
    os.write(got, b"still open")
    os.close(got)


def test_the_other_end_is_gone(pair: Pair) -> None:
    left, right = pair
    send(left, b"last")
    left.close()
    assert receive(right) == (b"last", None)
    assert receive(right) == (b"", None)
    with pytest.raises(BrokenPipeError):  # and no signal
        send(right, b"anybody?")


def attach(count: int) -> list[tuple[int, int, array.array[int]]]:
    """Ancillary data with so many descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))]


@pytest.mark.parametrize(
    ("data", "count"), [(b"x", 2), (b"x", 3), (b"x", 200), (b"x" * (MESSAGE_BYTES_MAX + 1), 1), (b"", 1), (b"", 2)]
)
def test_what_is_not_allowed_is_closed_and_refused(pair: Pair, data: bytes, count: int) -> None:
    left, right = pair
    before = descriptors()
    for _ in range(3):
        left.sendmsg([data], attach(count))
        with pytest.raises(ProtocolError):
            receive(right)
    assert descriptors() == before
    send(left, b"and on it goes")
    assert receive(right) == (b"and on it goes", None)


def test_an_oversized_datagram_is_refused_and_not_cut(pair: Pair) -> None:
    left, right = pair
    send(left, b"x" * (MESSAGE_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match=f"over {MESSAGE_BYTES_MAX}"):
        receive(right)
    send(left, b"next")
    assert receive(right) == (b"next", None)


def test_the_peer_is_who_the_kernel_says(pair: Pair) -> None:
    peer = peer_of(pair[0])
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())


# The folder


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path, as a socket's must be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder / "ckptd" / "daemon.sock"
    shutil.rmtree(folder)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


MASKED = """
import os, sys
from pathlib import Path
from ckptd.wire.channel import prepare_folder
os.umask(int(sys.argv[2], 8))
prepare_folder(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("umask", ["000", "022", "077", "777"])
def test_the_folder_is_private_whatever_the_umask(place: Path, umask: str) -> None:
    deeper = place.parent / "run" / "s.sock" if umask == "000" else place
    subprocess.run([sys.executable, "-c", MASKED, deeper, umask], check=True, timeout=60)
    assert mode_of(deeper.parent) == 0o700
    if umask == "000":
        assert mode_of(place.parent) == 0o700


def test_a_good_folder_is_used_again(place: Path) -> None:
    prepare_folder(place)
    (place.parent / "daemon.log").touch()
    prepare_folder(place)
    check_folder(place)
    os.chmod(place.parent, 0o500)
    check_folder(place)  # more closed is as good
    os.chmod(place.parent, 0o700)


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o770, 0o701, 0o710, 0o1777])
def test_an_open_folder_is_refused_and_left_as_it_is(place: Path, mode: int) -> None:
    place.parent.mkdir()
    os.chmod(place.parent, mode)
    for check in (prepare_folder, check_folder):
        with pytest.raises(AccessDenied, match=f"mode {mode & 0o777:o}"):
            check(place)
    assert mode_of(place.parent) == mode


def test_a_wider_mode_is_taken_where_it_was_asked_for(place: Path) -> None:
    prepare_folder(place, mode=0o750)
    assert mode_of(place.parent) == 0o750
    check_folder(place, mode=0o750)
    with pytest.raises(AccessDenied):
        check_folder(place)


def test_a_link_in_the_folders_place_is_refused(place: Path) -> None:
    real = place.parent.with_name("real")
    real.mkdir(mode=0o700)
    place.parent.symlink_to(real)
    for check in (prepare_folder, check_folder):
        with pytest.raises(AccessDenied, match="is not a folder"):
            check(place)
    place.parent.unlink()
    place.parent.symlink_to(real / "nowhere")
    with pytest.raises(AccessDenied, match="is not a folder"):
        prepare_folder(place)
    assert not (real / "nowhere").exists()


def test_a_file_in_the_folders_place_is_refused(place: Path) -> None:
    place.parent.touch(mode=0o600)
    with pytest.raises(AccessDenied, match="is not a folder"):
        prepare_folder(place)


def test_another_users_folder_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(place.parent, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)  # only root can give a folder away
    with pytest.raises(AccessDenied, match="belongs to uid"):
        check_folder(place)
    with pytest.raises(AccessDenied, match="belongs to uid"):
        prepare_folder(place)


def test_no_folder_is_not_a_bad_folder(place: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_folder(place)


def test_a_path_too_long_for_a_socket_is_an_error_before_anything_is_made(place: Path) -> None:
    long = place.parent / ("x" * 100)
    with pytest.raises(ConfigError, match="too long for a socket"):
        prepare_folder(long)
    assert not place.parent.exists()


def test_the_default_is_a_folder_of_this_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(channel.SOCKET_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/somebody")
    assert default_socket() == Path("/run/somebody/ckptd/daemon.sock")
    monkeypatch.setenv(channel.SOCKET_VARIABLE, "/elsewhere/s")
    assert default_socket() == Path("/elsewhere/s")
