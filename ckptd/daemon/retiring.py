"""Retention in the background: after a commit, and where room is needed; one pass at a time for each root."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptd.checkpoint.retention import Outcome, apply
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.survey import Known
from ckptd.daemon.exchange import clear_exchange
from ckptd.daemon.owner import Owner
from ckptd.daemon.save import Tally
from ckptd.daemon.tier import Exchange, Tier
from ckptd.errors import Superseded, first_line
from ckptd.format.keys import Version
from ckptd.storage import Backend, LeavingUploads

log = logging.getLogger(__name__)

PASSES_KEPT = 64
"""Roots whose last pass the status tells of."""

Holds = Callable[[str, Sequence[Version]], Mapping[Version, str]]
"""URL of a tier and its line, newest first → what of it is still to be copied further, in words."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    owner: Owner
    tier: Tier
    run: str
    version: Version
    """What was committed, and so gives rise to it."""
    exchange: Exchange | None


@dataclass(frozen=True, slots=True)
class Pass:
    """The last pass over one root, for the status."""

    outcome: Outcome = field(default_factory=Outcome)
    error: str = ""
    """Why nothing could be done at all."""
    unix_seconds: float = field(default_factory=time.time)


class Retiring:
    """What fails is logged, counted and shown, and tried again after the next commit or full store. It never fails a
    save."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        holds: Holds,
        tally: Tally,
        grace_seconds: float,
    ) -> None:
        self.passes: OrderedDict[str, Pass] = OrderedDict()
        """URL → the last one."""
        self._known: OrderedDict[tuple[str, str], Known] = OrderedDict()
        """URL and run → what its manifests say."""
        self._spawn = spawn
        self._holds = holds
        self._tally = tally
        self._grace_seconds = grace_seconds
        self._wanted: dict[str, _Wanted] = {}
        """URL → the pass to be made next."""
        self._running: dict[str, _Wanted] = {}

    @property
    def backends(self) -> list[Backend]:
        """Those in use."""
        passes = self._running.values()
        return [*(each.tier.backend for each in passes), *(each.exchange.backend for each in passes if each.exchange)]

    def soon(self, owner: Owner, tier: Tier, run: str, version: Version) -> None:
        """Make a pass over a tier soon, where that is for this trainer's daemon to do: rank 0's, and on a disk of its
        own each node's. Several requests during one pass make one more."""
        url = tier.backend.url
        if owner.seat.rank != 0 and tier.shared:
            return
        exchange = owner.exchange(tier) if owner.seat.rank == 0 else None
        self._wanted[url] = _Wanted(owner, tier, run, version, exchange)
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

    async def _pass(self, wanted: _Wanted) -> None:
        run = Run(wanted.tier.backend, wanted.run)
        url = run.backend.url
        try:
            outcome = await apply(
                run,
                wanted.tier.keep,
                generation=wanted.version.generation,
                held=partial(self._holds, url),
                known=self._known_of(url, run.id),
                grace_seconds=self._grace_seconds,
            )
            if wanted.exchange is not None:
                await clear_exchange(wanted.exchange, await run.committed())
            if isinstance(run.backend, LeavingUploads):
                await run.backend.abort_stale_uploads()
        except Superseded as error:
            log.info("%s", error)
        except Exception as error:
            self._keep(url, Pass(error=first_line(error)))
            self._failed(wanted, {wanted.version: first_line(error)})
        else:
            self._keep(url, Pass(outcome))
            self._tally.counts["retired"] += len(outcome.deleted)
            self._failed(wanted, outcome.failed)
            for version, reason in outcome.waiting.items():
                log.warning("retention at %s: %s stays for now: %s", url, version, reason)

    def _known_of(self, url: str, run: str) -> Known:
        known = self._known.setdefault((url, run), Known())
        self._known.move_to_end((url, run))
        while len(self._known) > PASSES_KEPT:
            self._known.popitem(last=False)
        return known

    def _keep(self, url: str, made: Pass) -> None:
        self.passes[url] = made
        self.passes.move_to_end(url)
        while len(self.passes) > PASSES_KEPT:
            self.passes.popitem(last=False)

    def _failed(self, wanted: _Wanted, failed: Mapping[Version, str]) -> None:
        self._tally.counts["retiring_failed"] += len(failed)
        for version, reason in failed.items():
            log.warning("retention at %s: %s stays for now: %s", wanted.tier.backend.url, version, reason)
        if failed:  # of many, one in the status: all have much the same reason
            version, reason = next(iter(failed.items()))
            self._tally.failed(wanted.owner.seat, version, "retention", reason)
