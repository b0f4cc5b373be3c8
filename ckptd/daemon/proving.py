"""The receipts of one commit on their way into its proof: known by name, in memory only for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from ckptd.checkpoint.concurrency import ahead
from ckptd.checkpoint.proofs import PROCESS_BYTES_MIN, Prover, start_prover
from ckptd.errors import ProverEnded
from ckptd.format.proof import Commit

log = logging.getLogger(__name__)

HELD_BYTES_FULL = PROCESS_BYTES_MIN
"""Of receipts that wait for those of the ranks before them. The proof begins when so much is there, or all: where all
fits and the ranks are few, a thread is enough. Then nothing more is read out of turn, and of what is being read as much
again is kept."""
READ_AHEAD = 16
"""Receipts that are read at the same time, once it is their turn."""
PROVERS_MAX = 3
"""So many processes may be ended by something else; what ends the third would end the next."""


class Proving:
    """Takes in receipts in any order, and proves them in order of rank.

    Memory: twice :data:`HELD_BYTES_FULL`, at most :data:`READ_AHEAD` receipts beyond, a few bytes a rank, and the proof
    itself where it is a small one. A prover that is killed is followed by another, which begins anew.
    """

    def __init__(self, world: int, read: Callable[[int], Awaitable[bytes]]) -> None:
        """``read``: a receipt that is known to be stored, again."""
        self.there: set[int] = set()
        """Ranks whose receipts are stored."""
        self._world = world
        self._read = read
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._prover: Prover | None = None
        self._large = False
        """There is more than fits."""
        self._provers = 0
        self._fed = 0
        """Ranks below it are in the proof."""
        self._asked: deque[int] = deque()
        """Ranks that the proof wants to look at again."""
        self._turn = asyncio.Lock()

    def take(self, rank: int, data: bytes | None) -> None:
        """A receipt that is stored; ``None``: whatever it is."""
        if rank in self.there:
            return
        self.there.add(rank)
        if data is None:
            return
        self._large = self._large or self._held_bytes + len(data) >= HELD_BYTES_FULL
        if self._held_bytes + len(data) <= 2 * HELD_BYTES_FULL:
            self._held[rank] = data
            self._held_bytes += len(data)

    def has(self, rank: int) -> bytes | None:
        """The receipt, where it is in memory."""
        return self._held.get(rank)

    @property
    def full(self) -> bool:
        """Whether to read no more out of turn."""
        return self._held_bytes >= HELD_BYTES_FULL

    @property
    def complete(self) -> bool:
        """Whether all receipts are stored."""
        return len(self.there) == self._world

    def waits_for(self, rank: int) -> bool:
        """Whether a proof has begun that goes on with this rank."""
        return self._prover is not None and rank == self._fed

    async def feed(self) -> None:
        """Prove on, up to the first rank whose receipt is not there. Nothing, as long as all may fit into memory and
        some are missing. Raises what the proof finds; after an error of ``read`` it can be called again."""
        while True:
            async with self._turn:
                if self._prover is None and not (self._large or self.complete):
                    return
                try:
                    await self._feed(await self._begun())
                except ProverEnded as error:
                    await self._again(error)
                else:
                    return

    async def _begun(self) -> Prover:
        if self._prover is None:
            self._prover = await start_prover(self._world, large=self._large)
        return self._prover

    async def _feed(self, prover: Prover) -> None:
        async with contextlib.aclosing(ahead(self._in_turn(), READ_AHEAD, self._receipt)) as receipts:
            async for data in receipts:
                await prover.add(data)
                self._fed += 1

    def _in_turn(self) -> Iterator[int]:
        rank = self._fed
        while rank in self.there:
            yield rank
            rank += 1

    async def _receipt(self, rank: int) -> bytes:
        data = self._held.pop(rank, None)
        if data is None:
            return await self._read(rank)
        self._held_bytes -= len(data)
        return data

    async def prove(self) -> Commit:
        """What all receipts add up to, once they are :attr:`complete`. As :meth:`feed`."""
        while True:
            await self.feed()
            try:
                return await self._concluded(await self._begun())
            except ProverEnded as error:
                await self._again(error)

    async def _concluded(self, prover: Prover) -> Commit:
        while True:
            if not self._asked:
                self._asked.extend(await prover.questions())
            if not self._asked:
                return await prover.commit()
            async with contextlib.aclosing(ahead(tuple(self._asked), READ_AHEAD, self._read)) as receipts:
                async for data in receipts:
                    await prover.look(self._asked[0], data)
                    self._asked.popleft()

    async def _again(self, error: ProverEnded) -> None:
        """Begin anew. Raises the error where that has not helped."""
        await self.aclose()
        self._provers += 1
        if self._provers >= PROVERS_MAX:
            raise error
        log.warning("%s: beginning anew", error)
        self._fed = 0
        self._asked.clear()

    async def aclose(self) -> None:
        """End the proof, done or not. Idempotent."""
        prover, self._prover = self._prover, None
        if prover is not None:
            await prover.aclose()
