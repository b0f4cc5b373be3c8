"""Retention in the background: after a commit, and where room is needed; one pass at a time for each root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptd.checkpoint.retention import apply
from ckptd.checkpoint.run import Run
from ckptd.daemon.exchange import clear_exchange
from ckptd.daemon.owner import Owner
from ckptd.daemon.tier import Exchange, Tier
from ckptd.errors import Superseded, first_line
from ckptd.format.keys import Version
from ckptd.storage import Backend

log = logging.getLogger(__name__)

Holds = Callable[[str, Sequence[Version]], Mapping[Version, str]]
"""URL of a tier and its line, newest first → what of it is still to be copied further, in words."""


@dataclass(frozen=True, slots=True)
class _Pass:
    tier: Tier
    run: str
    generation: int
    exchange: Exchange | None


class Retiring:
    """What fails is logged and counted, and tried again after the next commit or full store. It never fails a save."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None], str], object], holds: Holds) -> None:
        self.deleted = 0
        """Checkpoints, since the start."""
        self.failed = 0
        self._spawn = spawn
        self._holds = holds
        self._wanted: dict[str, _Pass] = {}
        """URL → the pass to be made next."""
        self._running: dict[str, _Pass] = {}

    @property
    def backends(self) -> list[Backend]:
        """Those in use."""
        passes = self._running.values()
        return [*(each.tier.backend for each in passes), *(each.exchange.backend for each in passes if each.exchange)]

    def soon(self, owner: Owner, tier: Tier, run: str, generation: int) -> None:
        """Make a pass over a tier soon, where that is for this trainer's daemon to do: rank 0's, and on a disk of its
        own each node's. Several requests during one pass make one more."""
        url = tier.backend.url
        if owner.seat.rank != 0 and tier.shared:
            return
        exchange = owner.exchange(tier) if owner.seat.rank == 0 else None
        self._wanted[url] = _Pass(tier, run, generation, exchange)
        if url not in self._running:
            self._running[url] = self._wanted[url]
            self._spawn(self._run(url), f"retention at {url}")

    async def _run(self, url: str) -> None:
        try:
            while url in self._wanted:
                self._running[url] = wanted = self._wanted.pop(url)
                await self._pass(wanted)
        finally:
            del self._running[url]

    async def _pass(self, wanted: _Pass) -> None:
        run = Run(wanted.tier.backend, wanted.run)
        held = partial(self._holds, run.backend.url)
        try:
            outcome = await apply(run, wanted.tier.keep, generation=wanted.generation, held=held)
            if wanted.exchange is not None:
                await clear_exchange(wanted.exchange, await run.committed())
        except Superseded as error:
            log.info("%s", error)
        except Exception as error:
            self.failed += 1
            log.warning("retention at %s: %s", run.backend.url, first_line(error))
        else:
            self.deleted += len(outcome.deleted)
            self.failed += len(outcome.failed)
            for version, reason in {**outcome.failed, **outcome.waiting}.items():
                log.warning("retention at %s: %s stays for now: %s", run.backend.url, version, reason)
