"""All commits that are under way in one daemon."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from ckptd.daemon.commit import Commit, Lost, Patience
from ckptd.daemon.receipts import put_skipped
from ckptd.daemon.tier import Checkpoint
from ckptd.format.keys import Version
from ckptd.storage import Backend

SKIPS_KEPT = 1024
"""Checkpoints for which skips of ranks here are remembered, for those who join later."""
SKIPS_TOLD_AT_ONCE_MAX = 16
"""Records of skips on their way to one store, and so to the other ranks' daemons; further ones wait for their turn."""
SKIPS_UNTOLD_MAX = 1024
"""So many are not there yet. Of further ones the others learn when their time is up."""


class _Telling:
    """Skips on their way to one store. Each has its own: none waits for a store that others save to."""

    def __init__(self) -> None:
        self.untold = 0
        self.turn = asyncio.Semaphore(SKIPS_TOLD_AT_ONCE_MAX)


class Commits:
    """All commits that are under way in one daemon."""

    def __init__(
        self, patience: Patience, spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    ) -> None:
        self._patience = patience
        self._spawn = spawn
        self._open: dict[tuple[str, Version], tuple[Commit, asyncio.Task[None]]] = {}
        self._skips: OrderedDict[tuple[str, Version], dict[int, str]] = OrderedDict()
        self._telling = WeakKeyDictionary[Backend, _Telling]()

    def join(
        self,
        checkpoint: Checkpoint,
        receipts: Mapping[int, bytes | None],
        lost: Lost,
        *,
        resumed: bool,
        leads: bool = False,
    ) -> asyncio.Task[None]:
        """Take part in the commit of a checkpoint with receipts that are durable; begins it where nobody has.
        A receipt that is ``None`` is read from its place when it is wanted.

        The task raises what :meth:`Commit.run` raises, for all who joined. ``resumed``: it may have been committed, or
        even deleted, before this daemon knew of it.
        """
        found = self._open.get(checkpoint.name)
        if found is None:
            commit = Commit(checkpoint, self._patience, lost, resumed=resumed)
            for rank, reason in self._skips.get(checkpoint.name, {}).items():
                commit.skip(rank, reason)
            commit.leads = commit.leads or leads or 0 in receipts
            task = self._spawn(commit.run(), f"commit of {checkpoint}")
            self._open[checkpoint.name] = (commit, task)
            task.add_done_callback(lambda _: self._open.pop(checkpoint.name))
        else:
            commit, task = found
        for rank, receipt in receipts.items():
            commit.join(rank, receipt)
        return task

    async def skip(self, checkpoint: Checkpoint, rank: int, reason: str) -> None:
        """A rank of this daemon takes no part: tell the others, here at once, and elsewhere through the store, unless
        it is behind with so many (:data:`SKIPS_UNTOLD_MAX`) that more would only fill the memory. Returns when they are
        told: until then they wait for what this rank will never save."""
        found = self._open.get(checkpoint.name)
        if found is not None:
            found[0].skip(rank, reason)
        self._skips.setdefault(checkpoint.name, {})[rank] = reason
        while len(self._skips) > SKIPS_KEPT:
            self._skips.popitem(last=False)
        backend, key = checkpoint.place(rank)
        telling = self._telling.setdefault(backend, _Telling())
        if not checkpoint.run or telling.untold >= SKIPS_UNTOLD_MAX:
            return
        telling.untold += 1
        try:
            async with telling.turn:
                await put_skipped(backend, key, checkpoint.version, rank, run=checkpoint.run, reason=reason)
        finally:
            telling.untold -= 1

    @property
    def telling(self) -> list[Backend]:
        """Stores to which skips are on their way."""
        return [backend for backend, telling in self._telling.items() if telling.untold]

    def nudge(self) -> None:
        """A trainer has died: commits that wait for it are to look now."""
        for commit, _ in self._open.values():
            commit.nudge()
