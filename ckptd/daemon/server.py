"""The daemon's process: one per socket, from start-up to drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptd import __version__
from ckptd.daemon.connection import Connection
from ckptd.daemon.service import Service
from ckptd.daemon.session import Session
from ckptd.daemon.settings import Settings
from ckptd.daemon.web import Web
from ckptd.errors import AccessDenied, CkptdError, DeadlineExceeded, ResourceError, first_line
from ckptd.exits import Exit
from ckptd.limits import CLIENTS_MAX
from ckptd.storage import preload
from ckptd.wire.channel import Peer, peer_of, prepare_folder
from ckptd.wire.messages import Incoming, Request

log = logging.getLogger(__name__)

BACKLOG = 128
ACCEPT_PAUSE_SECONDS = 1.0
TURNED_AWAY_MAX = 64
TURNED_AWAY_SECONDS = 5.0
HOUSEKEEPING_SECONDS = 1.0
GARBAGE_LOOK_OBJECTS = 50_000
"""Made and not freed since Python last looked for garbage."""


async def serve(settings: Settings) -> None:
    """Serve until drained or idle for long. Returns at once, quietly, where another daemon serves this socket.

    SIGTERM and SIGINT drain within ``drain_seconds``; a second one ends the process on the spot. Raises
    :class:`DeadlineExceeded`, naming what is not finished, when the drain took too long, and :class:`AccessDenied`
    where the socket's folder is not ours alone.
    """
    prepare_folder(settings.socket, mode=settings.folder_mode)
    with _only_one(settings.socket) as first:
        if not first:
            log.debug("another daemon serves %s", settings.socket)
            return
        settings.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _listening(settings) as listener:
            await _serve(settings, listener)


async def _serve(settings: Settings, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(settings.budgets.other_threads_used, thread_name_prefix="ckptd-other"))
    service = Service(settings)
    drains: list[asyncio.Task[None]] = []

    def stop() -> None:
        if drains:
            log.error("a second signal: ending at once")
            os._exit(Exit.INTERRUPTED)
        drains.append(loop.create_task(service.drain(settings.drain_seconds)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    door = _Door(service, listener)
    housekeeping = loop.create_task(_keep_house(service))
    service.tasks.spawn(service.watch.run(), "watchdog")
    service.tasks.spawn(service.logs.run(), "training log")
    service.tasks.spawn(service.ready.make(service.arenas.room_bytes), "arenas made ahead")
    service.monitor.start()
    log.info("ckptd %s serves %s, process %d", __version__, settings.socket, os.getpid())
    web = None
    try:
        if settings.metrics_address is not None:
            web = Web(service, settings.metrics_address)
        await service.ending.wait()
        if drains:
            await drains[0]
    except DeadlineExceeded as error:
        log.error("not finished: %s", error)
        raise
    finally:
        door.close()
        settings.socket.unlink(missing_ok=True)
        housekeeping.cancel()
        await asyncio.wait([housekeeping])
        if web is not None:
            await asyncio.to_thread(web.close)
        await service.close()
        log.info("ended")


class _Door:
    """Accepts clients, and turns away those who may not come in."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener
        self._turned_away: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._open()

    def _open(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._turned_away):
            connection.close("")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: the clients wait in the backlog
            log.error("cannot accept a client: %s", error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._open)
            return
        try:
            peer = peer_of(connection)
            reason = self._objection(peer)
            if reason is not None:
                self._turn_away(connection, peer, reason)
            else:
                self._service.sessions.add(Session(self._service, connection, peer))
        except (CkptdError, OSError) as error:
            log.error("process %d cannot be served: %s", peer_of(connection).pid, first_line(error))
            connection.close()

    def _objection(self, peer: Peer) -> CkptdError | None:
        if peer.uid not in {os.geteuid(), 0, *self._service.settings.allowed_uids}:
            return AccessDenied(f"uid {peer.uid} may not use this daemon", hint="allow it with --allow-uid")
        if len(self._service.sessions) >= CLIENTS_MAX:
            return ResourceError(f"{CLIENTS_MAX} clients are connected, and more are not taken")
        return None

    def _turn_away(self, connection: socket.socket, peer: Peer, reason: CkptdError) -> None:
        """Answer whatever is asked first with the reason; do not wait for it for long."""
        if len(self._turned_away) >= TURNED_AWAY_MAX:
            connection.close()
            return

        def received(message: Incoming, fd: int | None) -> None:
            if fd is not None:
                os.close(fd)
            visitor.refuse(reason, message.request if isinstance(message, Request) else 0)

        visitor = Connection(connection, peer, received=received, closed=lambda: self._turned_away.discard(visitor))
        self._turned_away.add(visitor)
        self._loop.call_later(TURNED_AWAY_SECONDS, visitor.close, str(reason))


async def _keep_house(service: Service) -> None:
    """End when idle for long, or idle and out of reach, as its socket is gone; close what nobody uses any more."""
    limit = service.settings.idle_exit_seconds
    busy_seconds = time.monotonic()
    while True:
        await asyncio.sleep(HOUSEKEEPING_SECONDS if limit is None else min(HOUSEKEEPING_SECONDS, limit))
        if not service.idle:
            busy_seconds = time.monotonic()
        elif not service.settings.socket.exists():
            log.warning("%s was removed: nobody can come any more", service.settings.socket)
            service.ending.set()
            return
        elif limit is not None and time.monotonic() - busy_seconds >= limit:
            log.info("idle for %g s", limit)
            await service.ready.keep(())
            service.ending.set()
            return
        try:
            await service.tidy()
        except Exception as error:
            log.error("housekeeping: %s", first_line(error), exc_info=not isinstance(error, CkptdError))


@contextlib.contextmanager
def _only_one(path: Path) -> Generator[bool]:
    """Whether this process is the one that may serve the socket. The lock dies with the process that holds it, and its
    file stays, as nobody could remove it without a race."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


@contextlib.contextmanager
def _listening(settings: Settings) -> Generator[socket.socket]:
    """The listening socket. What a dead daemon left at its place is removed; a living one would hold the lock."""
    path = settings.socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if not path.is_socket():
                raise AccessDenied(f"{path} is there and is no socket", hint="remove it, or choose another") from None
            log.info("%s was left by a daemon that died", path)
            path.unlink()
            listener.bind(str(path))
        path.chmod(0o666 if settings.allowed_uids else 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        yield listener


def run(settings: Settings) -> int:
    """:func:`serve` in an event loop of its own, with logging set up. Returns the exit code."""
    _log_to(settings.log_file)
    preload()
    # What was imported stays, and need not be looked through for garbage ever again. A proof makes hundreds of
    # thousands of objects, and no garbage that is not freed without looking.
    gc.freeze()
    gc.set_threshold(GARBAGE_LOOK_OBJECTS)
    try:
        settings.budgets.lower_priority()
        asyncio.run(serve(settings))
    except CkptdError as error:
        log.error("%s", error)
        return error.exit_code
    except OSError as error:
        log.error("%s: %s", settings.socket, error)
        return 1
    return 0


def _log_to(path: Path | None) -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        filename=path,
        force=True,
    )
