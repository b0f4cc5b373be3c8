"""One question to the daemon, and its answer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TypeVar

from ckptd.errors import AccessDenied, DaemonError, DeadlineExceeded
from ckptd.wire import channel, messages
from ckptd.wire.messages import Refused, Request

Reply = TypeVar("Reply", bound=Request)


def call(path: Path, request: Request, kind: type[Reply], *, seconds: float) -> Reply:
    """Ask the daemon at ``path``.

    Raises what it refuses with, :class:`DaemonError` where none is there or it goes away, :class:`DeadlineExceeded`
    where it does not answer in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(seconds)
        try:
            os.lstat(path)  # where there is none, the folder's mode does not matter
            # Through 0711 others can pass but not look; whose folder and daemon it is decides.
            channel.check_folder(path, mode=0o711)
            connection.connect(str(path))
            peer = channel.peer_of(connection)
            if peer.uid not in (os.geteuid(), 0):
                raise AccessDenied(f"the daemon at {path} runs as uid {peer.uid}, not as you")
            channel.send(connection, messages.encode(request))
            data, fd = channel.receive(connection)
        except TimeoutError:
            raise DeadlineExceeded(f"the daemon at {path} did not answer within {seconds:g} s") from None
        except PermissionError:
            owner = _owner(path)
            raise AccessDenied(
                f"{path} belongs to {owner or 'another user'}, and is closed to uid {os.geteuid()}",
                hint="ask as that user; whether a daemon runs there cannot be told from here",
            ) from None
        except OSError as error:
            raise DaemonError(
                f"no daemon at {path}: {error.strerror or error}",
                hint="nothing is being written; `ckptd serve` starts one, and so does a trainer",
            ) from None
    if fd is not None:
        os.close(fd)
    if not data:
        raise DaemonError(f"the daemon at {path} went away before it answered")
    reply = messages.decode_outgoing(data)
    if isinstance(reply, Refused):
        raise messages.as_error(reply)
    if not isinstance(reply, kind):
        raise DaemonError(f"the daemon answered a {type(request).__name__} with a {type(reply).__name__}")
    return reply


def _owner(path: Path) -> str:
    """Of the socket, or the nearest folder above it that can be seen."""
    for place in (path, *path.parents):
        try:
            return f"uid {place.stat().st_uid}"
        except OSError:
            continue
    return ""
