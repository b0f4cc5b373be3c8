"""Proving a commit without holding up who asks for it: in a thread, or for a large world in a process.

Both say the same, byte for byte. The process is started by exec (nothing is forked from a large process with threads),
sees receipts and nothing else, and ends with whoever started it; see :mod:`ckptd.checkpoint.prover`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from ckptd.checkpoint import prover
from ckptd.checkpoint.concurrency import in_thread
from ckptd.errors import CkptdError, ProverEnded, from_fields
from ckptd.format.proof import Commit, Proof
from ckptd.format.records import Manifest, decode
from ckptd.limits import MIB

log = logging.getLogger(__name__)

PROCESS_RANKS_MIN = 64
"""From so many receipts on, a proof has a process of its own: some tenths of a second with a thousand tensors. Starting
one takes a tenth."""

PROCESS_BYTES_MIN = 32 * MIB
"""And from so many bytes of receipts on, however few they are."""


class Prover(Protocol):
    """A :class:`ckptd.format.proof.Proof` to await. Raises what it raises, then or later, and :class:`ProverEnded`."""

    async def add(self, data: bytes) -> None:
        """The receipt of the next rank. Returns when the next one may come."""
        ...

    async def questions(self) -> list[int]:
        """See :class:`ckptd.format.proof.Proof`."""
        ...

    async def look(self, rank: int, data: bytes) -> None:
        """See :class:`ckptd.format.proof.Proof`."""
        ...

    async def commit(self) -> Commit:
        """See :class:`ckptd.format.proof.Proof`. Once."""
        ...

    async def aclose(self) -> None:
        """Let go of it, done or not. Idempotent."""
        ...


async def start_prover(receipts: int, *, early: bool = False, large: bool = False) -> Prover:
    """For so many receipts. In a process where they are many, or ``large`` in sum, and this machine can start one."""
    if receipts < PROCESS_RANKS_MIN and not large:
        return _InThread(receipts, early=early)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            prover.__name__,
            str(receipts),
            "early" if early else "now",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        log.warning("cannot start a process for the proof of %d receipts: %s", receipts, error)
        return _InThread(receipts, early=early)
    return _InProcess(process)


@contextlib.asynccontextmanager
async def prover_for(receipts: int, *, early: bool = False, large: bool = False) -> AsyncGenerator[Prover]:
    """:func:`start_prover`, closed at the end."""
    found = await start_prover(receipts, early=early, large=large)
    try:
        yield found
    finally:
        await found.aclose()


class _InThread:
    """In threads of the loop, one call at a time."""

    def __init__(self, receipts: int, *, early: bool) -> None:
        self._proof = Proof(receipts, early=early)

    async def add(self, data: bytes) -> None:
        await in_thread(self._proof.add, data)

    async def questions(self) -> list[int]:
        return await in_thread(self._proof.questions)

    async def look(self, rank: int, data: bytes) -> None:
        await in_thread(self._proof.look, rank, data)

    async def commit(self) -> Commit:
        return await in_thread(self._proof.commit)

    async def aclose(self) -> None:
        pass


class _InProcess:
    """What is sent lies in the pipe and a buffer as long as one receipt, until the process takes it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._asked = process.stdin
        self._answers = process.stdout
        self._over = False
        """It has said its last word, and ends by itself."""

    async def add(self, data: bytes) -> None:
        await self._send(prover.ADD, data)

    async def questions(self) -> list[int]:
        await self._send(prover.ASK)
        _, data = await self._answer()
        return msgspec.json.decode(data, type=list[int])

    async def look(self, rank: int, data: bytes) -> None:
        await self._send(prover.LOOK, prover.RANK.pack(rank), data)

    async def commit(self) -> Commit:
        await self._send(prover.COMMIT)
        objects, pinned = dict[str, bytes](), False
        while True:
            letter, data = await self._answer()
            if letter == prover.MANIFEST:
                return Commit(await in_thread(decode, data, Manifest), objects, pinned)
            if letter == prover.PINNED:
                pinned = True
            else:
                (size,) = prover.KEY_BYTES.unpack_from(data)
                start = prover.KEY_BYTES.size + size
                objects[data[prover.KEY_BYTES.size : start].decode()] = data[start:]

    async def aclose(self) -> None:
        self._asked.close()
        if not self._over:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.communicate()

    async def _send(self, letter: bytes, *parts: bytes) -> None:
        try:
            self._asked.write(prover.HEAD.pack(letter, sum(map(len, parts))))
            for part in parts:
                self._asked.write(part)
            await self._asked.drain()
        except ConnectionError:
            await self._answer()  # why it takes nothing more
            raise await self._ended() from None

    async def _answer(self) -> tuple[bytes, bytes]:
        try:
            letter, size = prover.HEAD.unpack(await self._answers.readexactly(prover.HEAD.size))
            data = await self._answers.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._ended() from None
        self._over = letter in (prover.MANIFEST, prover.REFUSED)
        if letter == prover.REFUSED:
            raise _refusal(data)
        return letter, data

    async def _ended(self) -> ProverEnded:
        status = await self._process.wait()
        return ProverEnded(
            f"the process that proves the commit, {self._process.pid}, ended with status {status}",
            hint="status -9 is mostly the kernel's, for want of memory",
        )


def _refusal(data: bytes) -> CkptdError:
    told = msgspec.json.decode(data, type=dict[str, str])
    return from_fields(told["error"], told["message"], told["hint"])
