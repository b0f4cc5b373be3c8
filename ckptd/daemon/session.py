"""One connected trainer: its messages become actions, and its end is noticed."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from ckptd import __version__
from ckptd.checkpoint.concurrency import in_thread
from ckptd.checkpoint.trial import Loader
from ckptd.daemon.arenas import HeldArena
from ckptd.daemon.connection import Connection
from ckptd.daemon.owner import Owner, PeerProcess, Seat
from ckptd.errors import CkptdError, ConfigError, ProtocolError, UsageError, first_line
from ckptd.format.keys import Version
from ckptd.limits import OFFERS_MAX, TIERS_MAX
from ckptd.pulse.loss_rules import LossRules
from ckptd.wire.channel import Peer
from ckptd.wire.messages import (
    PROTOCOL,
    ArenaGranted,
    AwaitIdle,
    BorrowArena,
    Done,
    Doubt,
    Doubted,
    Drain,
    DropArena,
    Filled,
    Filling,
    GetLives,
    GetStatus,
    HandArena,
    HandWatched,
    Hello,
    Incoming,
    ListOffers,
    Lives,
    MakeArena,
    Offers,
    Outgoing,
    Request,
    Sealed,
    Skip,
    SlotRef,
    Status,
    Voided,
    Welcome,
    refusal,
)

if TYPE_CHECKING:
    from ckptd.daemon.service import Service

log = logging.getLogger(__name__)


class Session:
    """Lives as long as the connection. Requests that take time are answered from tasks of their own; what a trainer
    says of its slots takes effect at once and in order."""

    def __init__(self, service: Service, connection: socket.socket, peer: Peer) -> None:
        self.service = service
        self.peer = peer
        self.owner: Owner | None = None
        self._greeted = False
        self._process = PeerProcess(peer.pid, self._died)
        self.connection = Connection(connection, peer, received=self._receive, closed=self._closed)

    # Ends

    def _died(self) -> None:
        # Children may still hold its socket open.
        self.connection.close("the process has ended")
        if self.owner is not None:
            self.service.died(self.owner)

    def _closed(self) -> None:
        if self.owner is not None:
            self.owner.connected = False
            self.owner.hung_up = self.connection.hung_up
            self.service.watch.left(self.owner)
            self.service.logs.left(self.owner)
        else:
            self._process.close()
        self.service.left(self)

    def close(self) -> None:
        """At the daemon's end."""
        self.connection.close("")
        self._process.close()

    # Messages

    def _receive(self, message: Incoming, fd: int | None) -> None:
        match message:
            case Hello():
                self._greet(message)
            case GetStatus():
                self._answer(message, self._status(message))
            case GetLives():
                self._answer(message, self._lives(message))
            case Doubt():
                self._answer(message, self._doubt(message))
            case Drain():
                self._answer(message, self._drain(message))
            case _:
                owner = self.owner
                if owner is None:
                    if fd is not None:
                        os.close(fd)
                    raise ProtocolError(f"a {type(message).__name__} before the Welcome")
                self._receive_from_owner(owner, message, fd)

    def _receive_from_owner(self, owner: Owner, message: Incoming, fd: int | None) -> None:
        saves = self.service.saves
        match message:
            case Filling(at=at):
                if held := self._own_arena(at):
                    saves.filling(held, at.slot, at.ticket)
            case Filled(at=at, bytes=final_bytes):
                if held := self._own_arena(at):
                    saves.filled(held, at.slot, at.ticket, final_bytes)
            case Sealed(at=at, not_finite=not_finite):
                if held := self._own_arena(at):
                    saves.sealed(held, at.slot, at.ticket, not_finite)
            case Voided(at=at, reason=reason):
                if held := self._own_arena(at):
                    saves.voided(held, at.slot, at.ticket, reason)
            case Skip():
                version = Version(message.step, message.generation)
                self._spawn(saves.skip(owner, version, message.run, message.reason), "skip")
            case HandWatched(part="rows") if fd is not None:
                self.service.logs.take(owner, fd)
            case HandWatched() if fd is not None:
                self.service.watch.take(owner, message.part, fd, message.signal)
            case HandArena() if fd is not None:
                self._answer(message, self._hand(owner, message, fd))
            case MakeArena():
                self._answer(message, self._make(owner, message))
            case ListOffers():
                self._answer(message, self._offers(owner, message))
            case BorrowArena():
                self._answer(message, self._borrow(owner, message))
            case DropArena():
                self._answer(message, self._drop(owner, message))
            case AwaitIdle():
                self._answer(message, self._await_idle(owner, message))
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _own_arena(self, at: SlotRef) -> HeldArena | None:
        held = self.service.arenas.find(at.arena)
        if held is None or held.owner is not self.owner:
            log.info("dropped a message for arena %s, which is not this trainer's", at.arena[:40])
            return None
        return held

    # Answers

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self.service.tasks.spawn(work, f"{what} of process {self.peer.pid}")

    def _answer(self, request: Request, work: Coroutine[Any, Any, tuple[Outgoing, int | None]]) -> None:
        async def answered() -> None:
            try:
                reply, fd = await work
            except Exception as error:
                if not isinstance(error, CkptdError):
                    log.exception("%s", type(request).__name__)
                log.info("refused a %s of process %s: %s", type(request).__name__, self.peer.pid, first_line(error))
                reply, fd = refusal(request.request, error), None
            self.connection.send(reply, fd)

        self._spawn(answered(), type(request).__name__)

    def _greet(self, hello: Hello) -> None:
        if self._greeted:
            raise ProtocolError("a second Hello")
        if hello.protocol != PROTOCOL:
            raise ProtocolError(
                f"protocol {hello.protocol}, and this daemon, ckptd {__version__}, speaks {PROTOCOL}",
                hint="run the same release of ckptd on both sides; `ckptd drain` ends the old daemon",
            )
        if not 1 <= len(hello.tiers) <= TIERS_MAX:
            raise ProtocolError(f"a Hello with {len(hello.tiers)} tiers")
        if hello.rank >= hello.world:
            raise ProtocolError(f"rank {hello.rank} in a world of {hello.world}")
        self._greeted = True
        self._answer(hello, self._welcome(hello))

    async def _welcome(self, hello: Hello) -> tuple[Outgoing, int | None]:
        try:
            tiers = await self.service.stores.open(hello.tiers)
            if not self.connection.open:
                raise UsageError("it went away")
            owner = Owner(
                seat=Seat(tiers[0].backend.url, hello.rank),
                world=hello.world,
                launch=hello.launch,
                tiers=tiers,
                process=self._process,
                send=self.connection.send,
                loader=self._loader(hello),
                load_every=hello.load_every,
                incremental=hello.incremental,
                on_bad_loss=hello.on_bad_loss,
                loss_rules=_loss_rules(hello),
                asked_tiers=hello.tiers,
            )
            self.service.seat(owner, takeover=hello.takeover)
        except Exception:
            self._greeted = False  # it may try again
            raise
        self.owner = owner
        return Welcome(request=hello.request, pid=os.getpid(), version=__version__), None

    def _loader(self, hello: Hello) -> Loader | None:
        if hello.loader is None:
            return None
        if self.peer.uid != os.geteuid():
            raise UsageError(
                f"user {os.geteuid()} runs no function for user {self.peer.uid}",
                hint="leave verify_load out, or run a daemon of your own",
            )
        try:
            return msgspec.convert(hello.loader, Loader)
        except msgspec.ValidationError as error:
            raise ConfigError(f"verify_load: {error}") from None

    async def _status(self, request: GetStatus) -> tuple[Outgoing, int | None]:
        return Status(request=request.request, status=self.service.status()), None

    async def _lives(self, request: GetLives) -> tuple[Outgoing, int | None]:
        return Lives(request=request.request, lives=self.service.watch.lives_of(request.launch)), None

    async def _doubt(self, request: Doubt) -> tuple[Outgoing, int | None]:
        version = await self.service.doubt(request.launch, request.reason)
        return Doubted(request=request.request, version="" if version is None else str(version)), None

    async def _drain(self, request: Drain) -> tuple[Outgoing, int | None]:
        await self.service.drain(request.deadline_seconds)
        return Done(request=request.request), None

    async def _make(self, owner: Owner, request: MakeArena) -> tuple[Outgoing, int | None]:
        held = await self.service.arenas.make(owner, request.slots, request.slot_bytes, only_ready=request.only_ready)
        return ArenaGranted(request=request.request, arena=held.arena.id), held.arena.fd

    async def _offers(self, owner: Owner, request: ListOffers) -> tuple[Outgoing, int | None]:
        offers = await in_thread(self.service.arenas.offers, owner)
        return Offers(request=request.request, offers=tuple(offers[:OFFERS_MAX])), None

    async def _borrow(self, owner: Owner, request: BorrowArena) -> tuple[Outgoing, int | None]:
        if request.read_only:
            held = self.service.arenas.show(owner, request.arena)
            return ArenaGranted(request=request.request, arena=held.arena.id), held.read_only_fd()
        held = self.service.arenas.lend(owner, request.arena)
        self.service.saves.settle(held, f"its arena went on to {owner}")
        return ArenaGranted(request=request.request, arena=held.arena.id), held.arena.fd

    async def _hand(self, owner: Owner, request: HandArena, fd: int) -> tuple[Outgoing, int | None]:
        self.service.saves.adopt(self.service.arenas.adopt(owner, request.arena, fd))
        return Done(request=request.request), None

    async def _drop(self, owner: Owner, request: DropArena) -> tuple[Outgoing, int | None]:
        held = self.service.arenas.find(request.arena)
        if held is None or held.owner is not owner:
            raise UsageError(f"arena {request.arena} is not this trainer's")
        self.service.arenas.drop(held)
        return Done(request=request.request), None

    async def _await_idle(self, owner: Owner, request: AwaitIdle) -> tuple[Outgoing, int | None]:
        await self.service.saves.idle(owner.seat.url, request.deadline_seconds)
        return Done(request=request.request), None


def _loss_rules(hello: Hello) -> LossRules:
    try:
        return msgspec.convert(hello.loss_rules, LossRules)
    except msgspec.ValidationError as error:
        raise ConfigError(f"loss_rules: {error}") from None
