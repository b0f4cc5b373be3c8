"""Verification in the background: what was committed is read again, proved, and from time to time really loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ckptd.checkpoint.processes import holder_here
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.trial import try_loading
from ckptd.checkpoint.verdicts import record_verdict
from ckptd.checkpoint.verify import Verification, verify
from ckptd.daemon.owner import Owner
from ckptd.daemon.save import Tally
from ckptd.daemon.tier import Tier
from ckptd.errors import NoCheckpoint, first_line
from ckptd.format.keys import Version
from ckptd.limits import TRIAL_SECONDS
from ckptd.storage import Backend

log = logging.getLogger(__name__)

COUNTED_MAX = 1024
"""Roots of which it is known how many commits ago one was loaded."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    owner: Owner
    tier: Tier
    run: str
    version: Version
    here: frozenset[int]
    """The ranks of the owner's world whose shards are to be there; of a shared tier that does not matter."""
    at_seconds: float = field(default_factory=time.monotonic)

    def holds(self, rank: int) -> bool:
        """Whether the shard of a rank is to be there."""
        return self.tier.shared or rank % self.owner.world in self.here


class Verifying:
    """One checkpoint at a time, the newest of each root; what a slow store leaves no time for is left out. A verdict is
    a mark on the checkpoint; a bad one is also logged, counted and shown. It never fails a save."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        tally: Tally,
        delay_seconds: float,
        *,
        enabled: bool,
    ) -> None:
        self.current: tuple[str, Version] | None = None
        """URL and checkpoint."""
        self._spawn = spawn
        self._tally = tally
        self._delay_seconds = delay_seconds
        self._enabled = enabled
        self._wanted: OrderedDict[str, _Wanted] = OrderedDict()
        """URL → what is to be verified next there."""
        self._at_work: _Wanted | None = None
        self._task: asyncio.Task[None] | None = None
        self._commits: OrderedDict[str, int] = OrderedDict()
        """URL → how many since the last one was loaded."""

    @property
    def backends(self) -> list[Backend]:
        """Those in use."""
        wanted = [*self._wanted.values(), *([self._at_work] if self._at_work else [])]
        return [backend for each in wanted for backend in (each.tier.backend, each.tier.verifying)]

    def soon(self, owner: Owner, tier: Tier, run: str, version: Version, here: Collection[int]) -> None:
        """Verify a commit soon, where that is for this trainer's daemon to do: rank 0's; and on a disk of a node's own
        that of the lowest rank ``here``, as far as its shards go."""
        first = 0 if tier.shared else min(here, default=-1)
        if not self._enabled or owner.seat.rank != first:
            return
        url = tier.backend.url
        if tier is owner.home:
            self._commits[url] = self._commits.pop(url, 0) + 1
            if len(self._commits) > COUNTED_MAX:
                self._commits.popitem(last=False)
        self._wanted[url] = _Wanted(owner, tier, run, version, frozenset(here))
        if self._task is None or self._task.done():
            self._task = self._spawn(self._run(), "verification")

    async def _run(self) -> None:
        while self._wanted:
            first = next(iter(self._wanted.values()))
            await asyncio.sleep(first.at_seconds + self._delay_seconds - time.monotonic())
            _, self._at_work = self._wanted.popitem(last=False)
            self.current = self._at_work.tier.backend.url, self._at_work.version
            try:
                await self._verify(self._at_work)
            finally:
                self._at_work = self.current = None

    async def _verify(self, wanted: _Wanted) -> None:
        run = Run(wanted.tier.verifying, wanted.run)
        holder = holder_here("verification")
        try:
            found = await self._look(wanted, run, holder)
            stands = await record_verdict(run, wanted.version, good=found.good, by=holder, reason=found.reason)
            self._tell(wanted, found, stands=stands)
        except NoCheckpoint:
            log.info("%s at %s is gone before it was verified", wanted.version, run.backend.url)
        except Exception as error:  # the store, mostly: it says nothing about the checkpoint
            self._failed(wanted, f"not verified: {first_line(error)}")

    async def _look(self, wanted: _Wanted, run: Run, holder: str) -> Verification:
        found = await verify(run, wanted.version, holder=holder, holds=wanted.holds)
        loader, url = wanted.owner.loader, wanted.tier.backend.url
        if found.good and loader is not None and self._commits.get(url, 0) >= wanted.owner.load_every:
            self._commits[url] = 0
            tried = await try_loading(loader, url, wanted.version, wanted.tier.options, deadline_seconds=TRIAL_SECONDS)
            if tried.result == "unknown":
                self._failed(wanted, f"not loaded: {tried.reason}")
            else:
                self._tally.counts["loaded"] += tried.result == "good"
                found = found.with_trial(tried)
        return found

    def _tell(self, wanted: _Wanted, found: Verification, *, stands: bool) -> None:
        if found.good:
            self._tally.counts["verified"] += 1
            self._tally.verified_unix_seconds[wanted.tier.backend.url] = time.time()
            log.info("verified %s at %s", wanted.version, wanted.tier.backend.url)
        elif stands:
            self._tally.counts["suspect"] += 1
            self._failed(wanted, f"suspect: {found.reason}")

    def _failed(self, wanted: _Wanted, error: str) -> None:
        self._tally.counts["verify_failed"] += 1
        self._tally.failed(wanted.owner.seat, wanted.version, "verify", error)
        log.warning("%s at %s: %s", wanted.version, wanted.tier.backend.url, error)
