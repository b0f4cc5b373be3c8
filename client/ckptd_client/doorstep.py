"""At the daemon's socket: knock, and start a daemon where nobody answers."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from ckptd.errors import AccessDenied
from ckptd.wire import channel

SEND_SECONDS = 5.0
"""A daemon that does not take a datagram for so long counts as gone."""


def connect(path: Path) -> socket.socket:
    """A connection to the daemon that answers at ``path``.

    Raises :class:`FileNotFoundError` and :class:`ConnectionError` where none does, :class:`AccessDenied` for a folder
    that others can write to and a daemon of another user, :class:`ckptd.errors.ConfigError` for too long a path.
    """
    channel.check_length(path)
    if path.parent.exists():
        channel.check_folder(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
        if channel.peer_of(connection).uid not in (os.geteuid(), 0):
            raise AccessDenied(f"the daemon at {path} runs as another user")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))
    except BaseException:
        connection.close()
        raise
    return connection


def spawn_daemon(path: Path) -> int:
    """Start a daemon in a session of its own, by exec, so that it outlives this process and inherits nothing. Its
    process id; it does not answer yet, and ends by itself where another one does."""
    channel.prepare_folder(path)
    log = os.open(log_path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "ckptd.daemon", "--socket", str(path)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(log)


def log_path(path: Path) -> Path:
    """Where a daemon that a client starts writes its log."""
    return path.with_suffix(".log")
