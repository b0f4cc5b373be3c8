"""A trainer without torch: speaks the wire protocol to a real daemon and fills real slots; and that daemon's process.

``python -m tests.daemon.trainer CONFIG`` is one as a process of its own, to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ckptd.arena import Arena, SlotRecord, SlotState
from ckptd.arena.memory import pages
from ckptd.errors import AlreadyExists, DaemonError
from ckptd.format import keys
from ckptd.format.digests import digest
from ckptd.format.keys import Version
from ckptd.format.records import (
    Run,
    encode,
)
from ckptd.pulse import Pulse
from ckptd.storage import open_backend
from ckptd.wire import channel, messages
from ckptd.wire.messages import (
    ArenaGranted,
    AwaitIdle,
    BorrowArena,
    Committed,
    Done,
    DropArena,
    Durable,
    Failed,
    Filled,
    Filling,
    GetStatus,
    HandArena,
    HandWatched,
    Hello,
    ListOffers,
    MakeArena,
    Message,
    Offers,
    Outgoing,
    Refused,
    Request,
    Sealed,
    Skip,
    SlotRef,
    SnapshotOffer,
    Status,
    TierOfRun,
    Voided,
    Welcome,
)
from devtools.processes import kill_group, spawn, wait_until
from tests.daemon.member import RUN, Content, Member

DEADLINE_SECONDS = 20.0
QUICK = ("--retention-grace", "0.2", "--verify-bandwidth", "0")
"""What a test waits for, it does not wait for long; and nothing is found out but what it asks for."""
Kind = TypeVar("Kind", bound=Message)


class DaemonProcess:
    """A daemon of the test's own."""

    def __init__(self, socket_path: Path, *options: str, mode: int = 0o700, prefix: tuple[str, ...] = ()) -> None:
        """``mode``: of the socket's folder. ``prefix``: what starts it."""
        self.socket = socket_path
        self.log = socket_path.with_suffix(".log")
        channel.prepare_folder(socket_path, mode=mode)
        with self.log.open("ab") as output:
            self.process = spawn(
                [*prefix, sys.executable, "-m", "ckptd.daemon", "--socket", socket_path, *QUICK, *options],
                output=output,
            )

    def wait_for(self) -> DaemonProcess:
        """Until it takes connections."""
        wait_until(self._answers, "the daemon", deadline_seconds=DEADLINE_SECONDS)
        return self

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise DaemonError(f"the daemon ended: {self.log.read_text()}")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(str(self.socket))
            return True
        return False

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)

    def kill(self) -> None:
        """SIGKILL."""
        kill_group(self.process)

    def __repr__(self) -> str:
        return f"daemon {self.process.pid} at {self.socket}"


@contextlib.contextmanager
def daemon_at(
    socket_path: Path, *options: str, mode: int = 0o700, prefix: tuple[str, ...] = ()
) -> Generator[DaemonProcess]:
    """A daemon that serves; killed at the end."""
    process = DaemonProcess(socket_path, *options, mode=mode, prefix=prefix)
    try:
        yield process.wait_for()
    finally:
        process.kill()


class Trainer:
    """One session. Blocking, every wait bounded; events that were not asked for are kept for later."""

    def __init__(self, socket_path: Path, member: Member) -> None:
        self.member = member
        self.arena: Arena | None = None
        """The one that is saved into; earlier ones stay mapped."""
        self._mapped: list[Arena] = []
        self.pulse: Pulse | None = None
        self.events: list[Outgoing] = []
        self._descriptor: int | None = None
        self._number = 0
        self._ticket = 0
        self._socket = connect(socket_path)

    # Messages

    def tell(self, message: Message, fd: int | None = None) -> None:
        # Where the daemon is gone, what matters lies in the arena all the same.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.send(self._socket, messages.encode(message), fd)

    def ask(self, request: Request, kind: type[Kind], *, fd: int | None = None) -> Kind:
        """The reply, or the error that it carries."""
        self._number += 1
        number = self._number
        self.tell(msgspec.structs.replace(request, request=number), fd)
        reply = self._next(lambda message: isinstance(message, Request) and message.request == number)
        if isinstance(reply, Refused):
            raise messages.as_error(reply)
        assert isinstance(reply, kind)
        return reply

    def expect(self, kind: type[Kind], *, step: int | None = None) -> Kind:
        """The next event of a kind."""
        found = self._next(
            lambda message: isinstance(message, kind) and (step is None or getattr(message, "step", step) == step)
        )
        assert isinstance(found, kind)
        return found

    def durable(self, at: SlotRef) -> Durable:
        """The event for this fill."""
        found = self._next(lambda message: isinstance(message, Durable) and message.at == at)
        assert isinstance(found, Durable)
        return found

    def outcome(self, step: int) -> Committed | Failed:
        """How the save of a step ended."""
        found = self._next(lambda message: isinstance(message, Committed | Failed) and message.step == step)
        assert isinstance(found, Committed | Failed)
        return found

    def _next(self, wanted: Callable[[Outgoing], bool]) -> Outgoing:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            for message in self.events:
                if wanted(message):
                    self.events.remove(message)
                    return message
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data, fd = channel.receive(self._socket)
            except TimeoutError:
                raise AssertionError(f"nothing of the kind came; there are {self.events}") from None
            if not data:
                raise DaemonError("the daemon closed the connection")
            if fd is not None:
                self._descriptor = fd
            self.events.append(messages.decode_outgoing(data))

    # Requests

    def hello(self) -> Welcome:
        member = self.member
        return self.ask(
            Hello(
                protocol=messages.PROTOCOL,
                tiers=member.tiers,
                rank=member.rank,
                world=member.world,
                launch=member.launch,
                takeover=member.takeover,
                loader=member.loader,
                load_every=member.load_every,
                incremental=member.incremental,
            ),
            Welcome,
        )

    def make_arena(self, slots: int = 2, slot_bytes: int = 1 << 20) -> Arena:
        self.ask(MakeArena(slots=slots, slot_bytes=slot_bytes), ArenaGranted)
        return self._map()

    def offers(self) -> tuple[SnapshotOffer, ...]:
        return self.ask(ListOffers(), Offers).offers

    def borrow_arena(self, arena: str) -> Arena:
        self.ask(BorrowArena(arena=arena), ArenaGranted)
        return self._map()

    def _map(self) -> Arena:
        assert self._descriptor is not None
        self.arena, self._descriptor = Arena(self._descriptor), None
        self._mapped.append(self.arena)
        self._ticket = max(record.ticket for record in self.arena.records())
        return self.arena

    def hand_arena(self, arena: Arena) -> None:
        self.ask(HandArena(arena=arena.id), Done, fd=arena.fd)
        self.arena = arena
        self._ticket = max(record.ticket for record in arena.records())

    def drop_arena(self) -> None:
        assert self.arena is not None
        self.ask(DropArena(arena=self.arena.id), Done)

    def await_idle(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.ask(AwaitIdle(deadline_seconds=deadline_seconds), Done)

    def watched(self) -> Pulse:
        """Hand in a pulse, which ends with the session."""
        self.pulse = Pulse()
        for part, fd in self.pulse.parts():
            self.tell(HandWatched(part=part, signal=self.pulse.dump_signal), fd)
        return self.pulse

    def status(self) -> dict[str, Any]:
        return self.ask(GetStatus(), Status).status

    def wait_for_stage(self, version: Version, stage: str) -> None:
        """Until the daemon has taken a save of this trainer so far."""

        def reached() -> bool:
            mine = {"run": self.member.url, "rank": self.member.rank, "version": str(version), "stage": stage}
            return any(mine.items() <= save.items() for save in self.status()["saves"]["listed"])

        wait_until(reached, f"{version} at {stage}", deadline_seconds=DEADLINE_SECONDS)

    # Saving

    def begin(self, content: Content, slot: int | None = None, *, torn: bool = False) -> SlotRef:
        """Take a slot and say that it is being filled. The snapshot record lies in it (``torn``: damaged), the shard
        does not yet."""
        arena = self.arena
        assert arena is not None
        if slot is None:
            wait_until(lambda: bool(_reusable(arena)), "a free slot", deadline_seconds=DEADLINE_SECONDS)
            slot = min(_reusable(arena), key=lambda number: arena.record(number).ticket)
        self._ticket += 1
        arena.set_record(slot, SlotRecord(ticket=self._ticket))
        memory = arena.slot(slot)
        memory[pages(len(content.shard)) : pages(len(content.shard)) + len(content.resident)] = content.resident
        start = pages(content.held_bytes)
        memory[start : start + len(content.doc)] = content.doc
        memory[start] ^= torn
        arena.set_record(
            slot,
            SlotRecord(
                state=SlotState.FILLING,
                step=content.version.step,
                generation=content.version.generation,
                ticket=self._ticket,
                shard_bytes=len(content.shard),
                doc_bytes=len(content.doc),
                doc_digest=digest(content.doc),
                pid=os.getpid(),
                held_bytes=content.held_bytes,
            ),
        )
        at = SlotRef(arena=arena.id, slot=slot, ticket=self._ticket)
        self.tell(Filling(at=at))
        return at

    def copy(self, at: SlotRef, content: Content, start: int, stop: int) -> None:
        """Copy part of the shard, and say so."""
        assert self.arena is not None
        self.arena.slot(at.slot)[start:stop] = content.shard[start:stop]
        self.tell(Filled(at=at, bytes=stop))

    def seal(self, at: SlotRef) -> None:
        self._move(at, SlotState.SEALED)
        self.tell(Sealed(at=at))

    def void(self, at: SlotRef, reason: str) -> None:
        self._move(at, SlotState.FREE)
        self.tell(Voided(at=at, reason=reason))

    def _move(self, at: SlotRef, state: SlotState) -> None:
        assert self.arena is not None
        record = self.arena.record(at.slot)
        self.arena.set_record(at.slot, replace(record, state=state))

    def save(self, step: int, size: int = 300_000) -> SlotRef:
        """A whole snapshot, sealed."""
        return self.put(self.member.content(step, size))

    def put(self, content: Content) -> SlotRef:
        """The same for any content."""
        at = self.begin(content)
        self.copy(at, content, 0, len(content.shard))
        self.seal(at)
        return at

    def skip(self, step: int, reason: str) -> None:
        self.tell(Skip(step=step, generation=self.member.generation, run=RUN, reason=reason))

    def close(self) -> None:
        self._socket.close()
        if self.pulse is not None:
            self.pulse.close()
        for arena in self._mapped:
            arena.close()
        if self._descriptor is not None:
            os.close(self._descriptor)


def _reusable(arena: Arena) -> list[int]:
    return [i for i, record in enumerate(arena.records()) if record.state in (SlotState.FREE, SlotState.DURABLE)]


def connect(socket_path: Path) -> socket.socket:
    """A raw connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(socket_path))
    except BaseException:
        connection.close()
        raise
    return connection


def begin_run(member: Member) -> None:
    """Say whose the member's roots are, as the first trainer of a run does."""

    async def begin(tier: TierOfRun) -> None:
        async with contextlib.aclosing(open_backend(tier.url, tier.storage_options)) as backend:
            with contextlib.suppress(AlreadyExists):
                await backend.put(keys.RUN, encode(Run(run=RUN)), if_absent=True)
            if tier.url == member.url and member.far_url:
                with contextlib.suppress(AlreadyExists):
                    await backend.put(keys.generation_key(member.generation), encode(member.record), if_absent=True)

    for tier in member.tiers:
        asyncio.run(begin(tier))


@contextlib.contextmanager
def trainer(socket_path: Path, member: Member, *, slots: int = 2, slot_bytes: int = 1 << 20) -> Generator[Trainer]:
    """A trainer of a run that was begun, with an arena (none with ``slots=0``)."""
    session = Trainer(socket_path, member)
    try:
        begin_run(member)
        session.hello()
        if slots:
            session.make_arena(slots, slot_bytes)
        yield session
    finally:
        session.close()


# What is on disk


class Victim:
    """A trainer in a process of its own, which saves ``steps`` and then stands still in the middle of the last."""

    def __init__(self, socket_path: Path, member: Member, steps: list[int], *, last: str, size: int = 300_000) -> None:
        """``last``: ``filling`` or ``sealed``, where the last step stands still; all others are sealed and durable."""
        config = {"socket": str(socket_path), "member": asdict(member), "steps": steps, "last": last, "size": size}
        self.process = spawn(
            [sys.executable, "-m", "tests.daemon.trainer", msgspec.json.encode(config).decode()],
            output=subprocess.PIPE,
        )

    def wait_for(self) -> Victim:
        """Until it stands still."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == b"standing still\n", line + self.process.stdout.read()
        return self

    @property
    def trainer_pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL."""
        kill_group(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()


def _stand_still(config: dict[str, Any]) -> None:
    member = Member(**config["member"])
    with trainer(Path(config["socket"]), member) as session:
        for step in config["steps"][:-1]:
            session.durable(session.save(step, config["size"]))
        content = member.content(config["steps"][-1], config["size"])
        at = session.begin(content)
        session.copy(at, content, 0, len(content.shard) // 2)
        if config["last"] == "sealed":
            session.copy(at, content, len(content.shard) // 2, len(content.shard))
            session.seal(at)
        print("standing still", flush=True)
        signal.pause()


if __name__ == "__main__":
    _stand_still(msgspec.json.decode(sys.argv[1]))
