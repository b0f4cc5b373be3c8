"""Where the socket is, and one datagram with at most one descriptor in or out."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ckptd.errors import AccessDenied, ConfigError, ProtocolError
from ckptd.limits import MESSAGE_BYTES_MAX

SOCKET_VARIABLE = "CKPTD_SOCKET"
_CREDENTIALS = struct.Struct("3i")
_FD = struct.Struct("i")
_PATH_BYTES_MAX = 100


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by the kernel's word. ``pid`` is 0 where it lives in a namespace that we cannot see."""

    pid: int
    uid: int
    gid: int


def default_socket() -> Path:
    """``$CKPTD_SOCKET``, else ``daemon.sock`` in a folder of this user's own."""
    given = os.environ.get(SOCKET_VARIABLE)
    if given:
        return Path(given)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "ckptd" if runtime else Path(tempfile.gettempdir()) / f"ckptd-{os.geteuid()}"
    return folder / "daemon.sock"


def prepare_folder(path: Path, *, mode: int = 0o700) -> None:
    """Make the socket's folder, or check the one that is there: ours, not a link, closed to others.

    Raises :class:`AccessDenied`, so that nobody can squat the place or listen in.
    """
    folder = path.parent
    check_length(path)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.mkdir(folder, mode)
        os.chmod(folder, mode)  # whatever the umask
    except FileExistsError:
        pass
    check_folder(path, mode=mode)


def check_length(path: Path) -> None:
    """Raise :class:`ConfigError` for a path that the kernel does not take as a socket's."""
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ConfigError(
            f"{path} is too long for a socket: at most {_PATH_BYTES_MAX} bytes",
            hint=f"choose a shorter one with --socket or ${SOCKET_VARIABLE}",
        )


def check_folder(path: Path, *, mode: int = 0o700) -> None:
    """Raise :class:`AccessDenied` unless the socket's folder belongs to this user, or to root, and is closed to others;
    :class:`FileNotFoundError` where there is none."""
    found = os.lstat(path.parent)
    if not stat.S_ISDIR(found.st_mode):
        raise AccessDenied(f"{path.parent} is not a folder", hint="remove it, or choose another with --socket")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o777 & ~mode:
        raise AccessDenied(
            f"{path.parent} belongs to uid {found.st_uid} with mode {found.st_mode & 0o777:o}",
            hint=f"it must belong to uid {os.geteuid()} with mode {mode:o}; choose another with --socket",
        )


def peer_of(connection: socket.socket) -> Peer:
    """Who connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> None:
    """One datagram, whole or not at all. The receiver gets a descriptor of its own."""
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
    connection.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """One datagram and the descriptor that came with it, close-on-exec. Empty data: the other end is gone.

    Raises :class:`ProtocolError` for an oversized datagram, for more than one descriptor, and for one without data;
    what came is closed.
    """
    # Not socket.recv_fds, which takes flags and drops them: descriptors would leak into what we start.
    data, ancillary, flags, _ = connection.recvmsg(
        MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(2 * _FD.size), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = [
        fd
        for level, kind, rights in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _FD.iter_unpack(rights[: len(rights) // _FD.size * _FD.size])
    ]
    cut = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    if len(data) > MESSAGE_BYTES_MAX or cut or len(fds) > 1 or (fds and not data):
        for fd in fds:
            os.close(fd)
        raise ProtocolError(
            f"a datagram over {MESSAGE_BYTES_MAX} bytes, with more than one descriptor, or with nothing else"
        )
    return data, fds[0] if fds else None
