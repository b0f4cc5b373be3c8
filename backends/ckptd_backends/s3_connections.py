"""Connections that can be broken off from another thread, and on which time limits mean what they say.

The client of boto3 knows neither. So its connections are of classes of our own, which tell whoever wants to break off a
request the socket that it is on, and keep the kernel from taking more of a body than a slow line carries within a time
limit: what the kernel has taken looks as if it was sent, and waiting for it as if the server was silent.

Without TLS they also send a body in one system call. With a time limit of Python's a socket never blocks: each time
that there is room for some bytes, a thread has to wake up and wait for the interpreter's lock, which eight uploads at
once never do without waiting for each other. So the kernel keeps the time while a body is sent.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool

from ckptd.limits import KIB

T = TypeVar("T")

UNSENT_BYTES = 256 * KIB
"""How much of a body may wait in the kernel: little enough that a slow line gets it off within a time limit."""

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


class _Sending(socket.socket):
    """Leaves the time limit for sending to the kernel; that for receiving stays Python's."""

    def limit(self, no_progress_seconds: float) -> None:
        fraction, seconds = math.modf(no_progress_seconds)
        # A struct timeval, as the kernel has it.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(fraction * 1e6)))

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Raises :class:`TimeoutError` where nothing can be sent for as long as the limit says: once it has passed,
        and before it has passed twice."""
        seconds = self.gettimeout()
        self.settimeout(None)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self.send(rest, flags) :]  # fewer than all: the limit has passed, and some were sent
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        finally:
            self.settimeout(seconds)


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
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            if type(self.sock) is socket.socket:  # TLS sends records of 16 KiB, one by one, whatever the socket
                sending = _Sending(fileno=self.sock.detach())
                sending.limit(no_progress_seconds)
                self.sock = sending
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
