"""Connections that can be broken off from another thread, and on which time limits mean what they say.

The client of boto3 knows neither. So its connections are of classes of our own, which tell whoever wants to break off a
request the socket that it is on, and keep the kernel from taking more of a body than a slow line carries within a time
limit: what the kernel has taken looks as if it was sent, and waiting for it as if the server was silent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool

from ckptd.limits import KIB

T = TypeVar("T")

SEND_BYTES = 256 * KIB
"""How much goes to the socket at once, and may wait there: enough to make Python's part of the work small, little
enough that a slow line gets it off within a time limit."""

_here = threading.local()


class Breaker:
    """Breaks off the requests of one blocking call. Used once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._broken = False

    def run(self, call: Callable[[], T]) -> T:
        """``call`` in this thread. Its requests fail once they are to be broken off."""
        _here.breaker = self
        try:
            return call()
        finally:
            _here.breaker = None
            with self._lock:
                self._socket = None  # the connection serves others from now on

    def break_off(self) -> None:
        """Make the request fail that runs now, and those that follow. From any thread; what cannot be broken off is the
        setting up of a connection, which has a limit of its own."""
        with self._lock:
            self._broken = True
            if self._socket is not None:
                _shut(self._socket)

    def watch(self, connected: socket.socket) -> None:
        """The request is on this socket."""
        with self._lock:
            self._socket = connected
            if self._broken:
                _shut(connected)


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has just been closed
        # Not the TLS socket's own method: for a moment that lets another thread send in plain text.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def make_breakable(client: Any, no_progress_seconds: float) -> None:
    """Give a client that has not been used yet connections that a :class:`Breaker` reaches, and that give up when they
    cannot send for so long."""
    session = client._endpoint.http_session
    classes = _pool_classes(no_progress_seconds)
    session._pool_classes_by_scheme = classes  # for managers of proxies, which come later
    session._manager.pool_classes_by_scheme = classes


def _pool_classes(no_progress_seconds: float) -> dict[str, type]:
    class Watched:
        """Mixed into a connection of botocore's."""

        def connect(self: Any) -> None:
            super().connect()  # type: ignore[misc]
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SEND_BYTES)
            self.sock.settimeout(no_progress_seconds)  # until now it was that for connecting
            _tell(self.sock)

        def request(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.sock is not None:
                _tell(self.sock)
            return super().request(*args, **kwargs)  # type: ignore[misc]

    class Plain(Watched, AWSHTTPConnection):  # type: ignore[misc]
        pass

    class Secure(Watched, AWSHTTPSConnection):  # type: ignore[misc]
        pass

    class PlainPool(AWSHTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(AWSHTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}


def _tell(connected: socket.socket) -> None:
    breaker: Breaker | None = getattr(_here, "breaker", None)
    if breaker is not None:
        breaker.watch(connected)
