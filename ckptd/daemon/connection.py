"""One client's socket on the event loop: whole messages in, whole messages out, and nothing blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from ckptd.errors import ProtocolError, first_line
from ckptd.limits import SEND_QUEUE_MAX
from ckptd.wire.channel import Peer, receive, send
from ckptd.wire.messages import (
    HandArena,
    HandWatched,
    Incoming,
    Outgoing,
    Request,
    decode_incoming,
    encode,
    refusal,
    request_number,
)

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 64
"""Read from one client before the others get their turn."""


class Connection:
    """Whatever is wrong with what one client sends or fails to read ends this connection and nothing else."""

    def __init__(
        self,
        connection: socket.socket,
        peer: Peer,
        *,
        received: Callable[[Incoming, int | None], None],
        closed: Callable[[], None],
    ) -> None:
        """``received`` takes over the descriptor that came along, and may raise :class:`ProtocolError`. ``closed`` is
        called once."""
        self.peer = peer
        self.hung_up = False
        """The other side ended it."""
        self._socket = connection
        self._received = received
        self._closed = closed
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._loop.add_reader(connection, self._readable)

    @property
    def open(self) -> bool:
        return self._socket.fileno() >= 0

    def send(self, message: Outgoing, fd: int | None = None) -> None:
        """Send now, or queue. A client that does not read is disconnected. ``fd`` remains the caller's."""
        if not self.open:
            return
        data = encode(message)
        if not self._unsent and self._try_send(data, fd):
            return
        if not self.open:
            return
        if len(self._unsent) >= SEND_QUEUE_MAX:
            self.close(f"{SEND_QUEUE_MAX} messages wait unread")
            return
        self._unsent.append((data, None if fd is None else os.dup(fd)))
        self._loop.add_writer(self._socket, self._writable)

    def _try_send(self, data: bytes, fd: int | None) -> bool:
        try:
            send(self._socket, data, fd)
        except BlockingIOError:
            return False
        except OSError as error:
            self.hung_up = True
            self.close(first_line(error))
            return False
        return True

    def _writable(self) -> None:
        while self._unsent:
            data, fd = self._unsent[0]
            if not self._try_send(data, fd):
                return
            self._unsent.popleft()
            if fd is not None:
                os.close(fd)
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if not self.open:
                return
            try:
                data, fd = receive(self._socket)
            except BlockingIOError:
                return
            except ProtocolError as error:
                self.refuse(error)
                return
            except OSError as error:
                self.hung_up = True
                self.close(first_line(error))
                return
            if not data:
                _close_fd(fd)
                self.hung_up = True
                self.close("")
                return
            self._take(data, fd)

    def _take(self, data: bytes, fd: int | None) -> None:
        try:
            message = decode_incoming(data)
            if (fd is not None) != isinstance(message, HandArena | HandWatched):
                raise ProtocolError("a descriptor goes with hand_arena and hand_watched, and with nothing else")
        except ProtocolError as error:
            _close_fd(fd)
            self.refuse(error, request_number(data))
            return
        try:
            self._received(message, fd)
        except ProtocolError as error:
            self.refuse(error, message.request if isinstance(message, Request) else 0)

    def refuse(self, error: Exception, request: int = 0) -> None:
        """Say why, in answer to ``request``, and close."""
        log.warning("client of process %s, uid %s: %s", self.peer.pid, self.peer.uid, first_line(error))
        self.send(refusal(request, error))
        # What lies unread at the end would make the kernel throw the refusal away as well.
        for _ in range(MESSAGES_PER_TURN):
            try:
                data, fd = receive(self._socket)
            except (ProtocolError, OSError):
                break
            _close_fd(fd)
            if not data:
                break
        self.close(first_line(error))

    def close(self, reason: str) -> None:
        """Idempotent."""
        if not self.open:
            return
        if reason:
            log.info("disconnected process %s: %s", self.peer.pid, reason)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for _, fd in self._unsent:
            _close_fd(fd)
        self._unsent.clear()
        self._closed()


def _close_fd(fd: int | None) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.close(fd)
