"""Whatever comes in by the socket, the daemon lives on, holds nothing of it, and serves the others."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

from ckptd.errors import CkptdError
from ckptd.limits import MESSAGE_BYTES_MAX
from ckptd.wire import channel, messages
from ckptd.wire.messages import Committed, Hello, TierOfRun
from devtools.processes import wait_until
from tests.daemon.trainer import Member, connect, daemon_at, trainer
from tests.hostile.decoders import decoders
from tests.hostile.mutations import changed

VISITS = 250
IDLE = 20


def _examples() -> list[bytes]:
    """All but the one that would rightly end the daemon, and none that names a place on disk."""
    tiers = (TierOfRun(url="memory://visit"),)
    hello = Hello(request=1, protocol=messages.PROTOCOL, tiers=tiers, rank=0, world=1, launch="visit")
    found = [
        data for data in decoders()["message to the daemon"].examples if b"drain" not in data and b"file:" not in data
    ]
    return [*found, *[messages.encode(hello)] * 4]


def _visit(place: Path, chance: random.Random, examples: list[bytes]) -> None:
    """Connect, say some things that are nearly right, or not at all, and go, with or without reading."""
    with connect(place) as visitor:
        visitor.settimeout(20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if chance.random() < 0.4:
                visitor.send(examples[-1])  # to be listened to
            for _ in range(chance.randint(1, 6)):
                data = chance.choice(examples)
                match chance.randrange(6):
                    case 0:
                        data = chance.randbytes(chance.randint(1, 500))
                    case 1:
                        data = data[: chance.randrange(len(data))] or b" "
                    case 2:
                        data = data.ljust(chance.choice([MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1]))
                    case _:
                        data = changed(data, chance)[: MESSAGE_BYTES_MAX + 1] or b" "
                if b"drain" in data:
                    continue
                fds = [os.memfd_create("sent", os.MFD_CLOEXEC) for _ in range(chance.choice([0, 0, 0, 1, 2, 9]))]
                try:
                    socket.send_fds(visitor, [data], fds) if fds else visitor.send(data)
                finally:
                    for fd in fds:
                        os.close(fd)
            if chance.random() < 0.5:
                with contextlib.suppress(CkptdError):
                    channel.receive(visitor)


def test_r145_r172_whatever_comes_in_harms_nobody(socket_path: Path, tmp_run: str) -> None:
    chance, examples = random.Random(4), _examples()
    with daemon_at(socket_path) as daemon, trainer(socket_path, Member(tmp_run)) as bystander:
        bystander.save(1)
        bystander.expect(Committed, step=1)
        holdings = Path(f"/proc/{daemon.process.pid}/fd")
        before = len(os.listdir(holdings))
        with contextlib.ExitStack() as silent:
            for _ in range(IDLE):
                silent.enter_context(connect(socket_path))  # and nothing more is heard of them
            for number in range(VISITS):
                _visit(socket_path, chance, examples)
                if number % 50 == 49:
                    bystander.save(number)
                    bystander.expect(Committed, step=number)
        wait_until(lambda: len(os.listdir(holdings)) <= before + 4, "descriptors to go", deadline_seconds=60)
        assert daemon.process.poll() is None
        log = daemon.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
