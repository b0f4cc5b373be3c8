"""The trainer's end of the socket: start a daemon where none runs, ask, listen, and come back after it was gone.

The training thread never waits for the daemon on the save path: it sends a datagram and goes on. A daemon that dies is
replaced from a thread; the arena stays mapped here, and what was sealed in it meanwhile is handed to the new one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from tenacity import Retrying, retry_if_exception_type, stop_after_delay

from ckptd.errors import CkptdError, DaemonError, DeadlineExceeded
from ckptd.jitter import backoff_seconds
from ckptd.limits import CONNECT_SECONDS
from ckptd.pulse.pulse import Pulse
from ckptd.wire import channel, messages
from ckptd.wire.messages import (
    ArenaGranted,
    Committed,
    Durable,
    Failed,
    HandWatched,
    Hello,
    Message,
    Outgoing,
    Refused,
    Request,
)
from ckptd_client.doorstep import SEND_SECONDS, connect, log_path, spawn_daemon

Event = Durable | Committed | Failed
Reply = TypeVar("Reply", bound=Request)

REPLY_SECONDS = 30.0


class DaemonLink:
    """One session with the daemon, renewed when it breaks. ``pulse``, from :meth:`open` on: what it is watched by."""

    def __init__(self, path: Path, hello: Hello, *, start_daemon: bool = True, logs: bool = True) -> None:
        """``logs``: this rank has a training log."""
        self._path = path
        self._logs = logs
        self._hello = hello
        self._start_daemon = start_daemon
        self._daemon_pid: int | None = None
        self.refusal: CkptdError | None = None
        """Why no daemon takes this trainer any more; the link stays down then."""
        self._closed = False
        self._up = False
        self._listener: threading.Thread | None = None
        self._lock = threading.Lock()
        self._replies: dict[int, Outgoing | None] = {}
        self._descriptors: dict[int, int] = {}
        self._replied = threading.Condition()
        self._numbers = iter(range(1, 2**62))

    def open(
        self,
        *,
        on_event: Callable[[Event], None],
        on_renewed: Callable[[], None],
        on_refused: Callable[[CkptdError], None],
    ) -> None:
        """Connect, or start a daemon and connect. Raises :class:`DaemonError`, or what the daemon refuses with.

        ``on_event`` is called on the listening thread for each event; ``on_renewed`` after a broken session was opened
        anew, with the link usable, to hand over the arenas; ``on_refused`` where the daemon does not take this trainer
        back, or sends it away, after which the link stays down.
        """
        self._on_event = on_event
        self._on_renewed = on_renewed
        self._on_refused = on_refused
        self._socket = self._connect(CONNECT_SECONDS)
        self.pulse = Pulse(logs=self._logs)
        self._up = True
        self._listener = threading.Thread(target=self._listen, name="ckptd-link", daemon=True)
        self._listener.start()
        try:
            self.welcome = self._greet()
        except BaseException:
            self.close()
            raise

    # Asking and telling

    def tell(self, message: Message) -> bool:
        """Send without waiting for anything. ``False`` where there is no daemon at the moment: what matters lies in the
        arena, and the next daemon finds it there."""
        return self._send(messages.encode(message), None)

    def ask(
        self, request: Request, kind: type[Reply], *, fd: int | None = None, seconds: float = REPLY_SECONDS
    ) -> Reply:
        """Send a request and wait for its reply.

        Raises what the daemon refused with, :class:`DaemonError` where it is gone, :class:`DeadlineExceeded`.
        """
        return self._ask(request, kind, fd, seconds)[0]

    def ask_for_arena(self, request: Request, *, seconds: float) -> int:
        """Like :meth:`ask`, for a reply that brings a descriptor, which now belongs to the caller."""
        reply, fd = self._ask(request, ArenaGranted, None, seconds)
        if fd is None:
            raise DaemonError(f"the daemon granted arena {reply.arena} without a descriptor")
        return fd

    def _ask(self, request: Request, kind: type[Reply], fd: int | None, seconds: float) -> tuple[Reply, int | None]:
        number = next(self._numbers)
        with self._replied:
            self._replies[number] = None
        try:
            if not self._send(messages.encode(msgspec.structs.replace(request, request=number)), fd):
                raise DaemonError(f"no daemon at {self._path}")
            with self._replied:
                self._replied.wait_for(lambda: self._replies[number] is not None or not self._up, seconds)
                reply = self._replies[number]
                got = self._descriptors.pop(number, None)
        finally:
            with self._replied:
                del self._replies[number]
        if reply is None:
            if not self._up:
                raise DaemonError(f"the daemon at {self._path} went away")
            raise DeadlineExceeded(f"the daemon did not answer a {type(request).__name__} within {seconds:g} s")
        if isinstance(reply, Refused):
            raise messages.as_error(reply)
        if not isinstance(reply, kind):
            raise DaemonError(f"the daemon answered a {type(request).__name__} with a {type(reply).__name__}")
        return reply, got

    def _send(self, data: bytes, fd: int | None) -> bool:
        with self._lock:
            if self._closed or not self._up:
                return False
            try:
                channel.send(self._socket, data, fd)
            except OSError:
                # The listener sees the end of the connection and renews it.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return False
            return True

    # Listening

    def _listen(self) -> None:
        while self._wanted:
            try:
                data, fd = channel.receive(self._socket)
                if data:
                    self._dispatch(messages.decode_outgoing(data), fd)
                    continue
            except (OSError, DaemonError):
                pass
            if self._wanted:
                self._renew()

    @property
    def _wanted(self) -> bool:
        return not self._closed and self.refusal is None

    def _dispatch(self, message: Outgoing, fd: int | None) -> None:
        if isinstance(message, Failed) and message.stage == "session":
            self._send_away(messages.as_error(message))
            return
        if isinstance(message, Durable | Committed | Failed):
            self._on_event(message)
            return
        with self._replied:
            if message.request in self._replies:
                self._replies[message.request] = message
                if fd is not None:
                    self._descriptors[message.request] = fd
                self._replied.notify_all()
            elif fd is not None:
                os.close(fd)

    def _renew(self) -> None:
        """Runs on the listening thread: connect again until it works or the link is closed."""
        self._go_down()
        while self._wanted:
            with contextlib.suppress(DaemonError, OSError):
                fresh = self._connect(CONNECT_SECONDS)
                with self._lock:
                    self._socket.close()
                    self._socket = fresh
                self._up = True
                # Greeting waits for a reply, which this thread has to receive.
                threading.Thread(target=self._greet_again, name="ckptd-greet", daemon=True).start()
                return
            time.sleep(1.0)

    def _go_down(self) -> None:
        """Nobody waits any longer for a reply that cannot come."""
        with self._replied:
            self._up = False
            self._replied.notify_all()

    def _greet_again(self) -> None:
        try:
            self.welcome = self._greet()
            self._on_renewed()
        except (DaemonError, DeadlineExceeded):
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # and so once more
        except CkptdError as error:
            self._send_away(error)

    def _send_away(self, error: CkptdError) -> None:
        """This trainer is not served any more: what it still has in hand fails now, and not when somebody waits."""
        self.refusal = error
        self._go_down()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._on_refused(error)

    def _greet(self) -> messages.Welcome:
        welcome = self.ask(self._hello, messages.Welcome)
        for part, fd in self.pulse.parts():
            self._send(messages.encode(HandWatched(part=part, signal=self.pulse.dump_signal)), fd)
        return welcome

    # Connecting

    def _connect(self, seconds: float) -> socket.socket:
        """A connected socket; starts a daemon where none answers, and where that is another's task, waits for it."""
        started = False
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type((FileNotFoundError, ConnectionError)),
                stop=stop_after_delay(seconds),
                wait=lambda state: backoff_seconds(state.attempt_number, 0.02, 0.5),
                reraise=True,
            ):
                with attempt:
                    if self._closed:
                        raise DaemonError("the link was closed")
                    if attempt.retry_state.attempt_number > 1 and self._start_daemon:
                        if not started or self._daemon_is_gone():
                            self._daemon_pid = spawn_daemon(self._path)
                        started = True
                    return connect(self._path)
        except (FileNotFoundError, ConnectionError) as error:
            hint = f"see {log_path(self._path)}" if started else "start one with: ckptd serve"
            raise DaemonError(f"no daemon answers at {self._path}: {error}", hint=hint) from None
        raise AssertionError("unreachable: the loop above returns or raises")

    def _daemon_is_gone(self) -> bool:
        """Whether the daemon that we started has ended; reaps it."""
        if self._daemon_pid is None:
            return False
        try:
            return os.waitpid(self._daemon_pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    # Ending

    def forget(self) -> None:
        """In a forked child: the session belongs to the parent, whose end the daemon must be able to see."""
        self._closed = True
        self._socket.close()
        self.pulse.forget()

    def close(self) -> None:
        """End the session. The daemon finishes what is sealed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._listener is None:  # it was never open
            return
        self._go_down()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join(timeout=SEND_SECONDS)
        self._socket.close()
        self.pulse.close()
        self._daemon_is_gone()
