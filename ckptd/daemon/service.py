"""The daemon's parts, put together: who sits where, what happens when they come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ckptd.checkpoint.doubt import doubt
from ckptd.daemon.arenas import Arenas
from ckptd.daemon.bad_loss import BadLosses
from ckptd.daemon.bases import Bases
from ckptd.daemon.commit import Patience
from ckptd.daemon.commits import Commits
from ckptd.daemon.owner import Owner, Seat
from ckptd.daemon.ready import ReadyArenas
from ckptd.daemon.replication import Replication
from ckptd.daemon.save import Tally
from ckptd.daemon.saves import Saves
from ckptd.daemon.session import Session
from ckptd.daemon.settings import Settings
from ckptd.daemon.status import status_of
from ckptd.daemon.stores import Stores, Use
from ckptd.daemon.tasks import Tasks
from ckptd.daemon.training_log import TrainingLogs
from ckptd.daemon.triage import give_up
from ckptd.daemon.verifying import Verifying
from ckptd.daemon.watch.sparing import Sparing
from ckptd.daemon.watch.watchdog import Watchdog
from ckptd.daemon.watch.webhook import Webhook
from ckptd.errors import DaemonError, DeadlineExceeded, NoCheckpoint, RunInUse
from ckptd.format.keys import Version
from ckptd.health.monitor import Monitor
from ckptd.limits import COPY_READS_AT_ONCE, VERIFY_READS_AT_ONCE
from ckptd.pace import Pace
from ckptd.storage import Limits
from ckptd.wire.messages import Failed

log = logging.getLogger(__name__)

LOCAL = "file://"
LOG_FLUSH_SECONDS = 5.0
"""What a drain leaves the training log at least, however late it is."""
TRIAGE_SECONDS = 0.5
"""How often a drain looks at what can still be done in time."""


class Service:
    """Everything but the socket."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.began_seconds = time.monotonic()
        self.sessions: set[Session] = set()
        self.seats: dict[Seat, Owner] = {}
        """Seat → its last owner, dead or alive."""
        self.starts: Counter[str] = Counter()
        """Run → how often its trainers were started, as far as it is known here."""
        self._launches: dict[str, str] = {}
        self._owners: set[Owner] = set()
        """All whose process is watched."""
        self.tasks = Tasks()
        budgets = settings.budgets
        writes = _pace(budgets.write_bytes_per_second)
        limits: dict[Use, Limits] = {
            "nearest": Limits(budgets.requests_inflight, up=writes),
            "further": Limits(budgets.requests_inflight, up=_pace(budgets.copy_bytes_per_second) or writes),
            "reading": Limits(COPY_READS_AT_ONCE),
            "verifying": Limits(VERIFY_READS_AT_ONCE, down=_pace(budgets.verify_bytes_per_second)),
        }
        self.stores = Stores(limits, settings.state_path, self.tasks.spawn, threads_max=budgets.io_threads_used)
        self.ready = ReadyArenas(settings.state_path / "arenas.json")
        self.arenas = Arenas(budgets.memory_bytes, self.ready)
        patience = Patience(settings.commit_seconds, settings.commit_takeover_seconds)
        commits, tally = Commits(patience, self.tasks.spawn), Tally()
        self._commits = commits
        self.verifying = Verifying(
            self.tasks.spawn, tally, settings.verify_delay_seconds, enabled=budgets.verify_bytes_per_second is not None
        )
        bases = Bases()
        self.replication = Replication(
            commits, tally, self.tasks.spawn, self.verifying, bases, settings.retention_grace_seconds
        )
        self.saves = Saves(
            self.tasks, commits, tally, self.replication, self.arenas, bases, threads=budgets.digest_threads_used
        )
        self.monitor = Monitor(settings.health_seconds)
        self.watch = Watchdog(settings.watch, settings.state_path, self._works_for, self.monitor.latest, self.tasks)
        self.bad_losses = BadLosses(
            self.tasks.spawn, self.watch.alerts.raise_, self._versions_under_way, self.watch.of_start
        )
        self.logs = TrainingLogs(
            self.tasks.spawn, tally.committed.get, self.bad_losses.hear, settings.log_write_seconds
        )
        self._sparing = Sparing(self.watch.alerts)
        tally.on_failed = self._sparing.failed
        self._webhook = None if settings.webhook is None else Webhook(settings.webhook)
        if self._webhook is not None:
            self.watch.alerts.sinks.append(self._webhook)
        self.ending = asyncio.Event()
        """Set when the daemon is to end, its work being done."""

    # Trainers come and go

    def seat(self, owner: Owner, *, takeover: bool) -> None:
        """Let a trainer take its seat. Raises :class:`RunInUse`, naming a living owner, unless ``takeover``."""
        if self.saves.draining:
            raise DaemonError("the daemon is draining", hint="try again: another one is started when it has ended")
        before = self.seats.get(owner.seat)
        if before is not None and before.connected and not before.dead:
            if not takeover:
                raise RunInUse(
                    f"{owner.seat} is held by {before}", hint="end it, or take the run away from it with takeover=True"
                )
            self._unseat(before, owner)
        self.seats[owner.seat] = owner
        if self._launches.get(owner.seat.url) != owner.launch:
            self._launches[owner.seat.url] = owner.launch
            self.starts[owner.seat.url] += 1
            if self.starts[owner.seat.url] > 1:
                self._sparing.restarted(owner, self.starts[owner.seat.url])
        self._owners.add(owner)
        self.saves.arrived(owner)
        log.info("%s: %s, world of %d", owner.seat, owner, owner.world)

    def _unseat(self, before: Owner, successor: Owner) -> None:
        log.warning("%s is taken from %s by %s", before.seat, before, successor)
        arenas = [held for held in self.arenas.all() if held.owner is before]
        records = [record for held in arenas for _, record in held.records()]
        newest = max(records, key=lambda record: record.ticket, default=None)
        before.post(
            Failed(
                step=newest.step if newest else 0,
                generation=newest.generation if newest else 0,
                stage="session",
                error="Superseded",
                message=f"{before.seat} was taken over by {successor}",
                hint="this trainer saves no more",
            )
        )
        self.saves.unseat(before, arenas, successor)
        for session in [session for session in self.sessions if session.owner is before]:
            session.connection.close("its seat was taken over")

    def died(self, owner: Owner) -> None:
        """A trainer is proven dead: what it sealed is finished, what it was filling is freed."""
        log.info("%s: %s has ended", owner.seat, owner)
        self.saves.settle_dead(owner, [held for held in self.arenas.all() if held.owner is owner])
        self.arenas.sweep()

    def left(self, session: Session) -> None:
        """A connection is closed."""
        self.sessions.discard(session)
        if session.owner is not None and session.owner.process.alive is None and session.owner.dead:
            self.died(session.owner)

    def _works_for(self, owner: Owner) -> bool:
        """Whether a snapshot that this trainer has sealed is not committed yet."""
        return any(save.owner.seat == owner.seat and save.fill.sealed for save in self.saves.under_way())

    def _versions_under_way(self, url: str) -> set[Version]:
        return {save.version for save in self.saves.under_way(url)}

    @property
    def idle(self) -> bool:
        """No clients and no work."""
        working = self.saves.under_way() or self.replication.busy or self.logs.busy or self._commits.telling
        return not self.sessions and not working

    async def tidy(self) -> None:
        """Give back what nobody needs any more: memory, connections, watches on processes."""
        self.arenas.sweep()
        await self.ready.keep(held.arena.shape for held in self.arenas.all() if not held.dropped)
        self.replication.tidy()
        busy = {held.owner for held in self.arenas.all()} | self.saves.busy_owners() | self.replication.busy_owners()
        busy |= self.logs.busy_owners() | self.bad_losses.busy_owners()
        for owner in [owner for owner in self._owners if not owner.connected and owner not in busy]:
            owner.process.close()
            self._owners.discard(owner)
            if self.seats.get(owner.seat) is owner:
                del self.seats[owner.seat]
        used = [backend for owner in self._owners for backend in owner.backends]
        await self.stores.close_others(
            [*used, *self._commits.telling, *self.replication.retiring.backends, *self.verifying.backends]
        )
        roots = (backend.url for backend in used if backend.url.startswith(LOCAL))
        self.monitor.watch([self.settings.state_path, *(Path(root.removeprefix(LOCAL)) for root in roots)])

    async def doubt(self, launch: str, reason: str) -> Version | None:
        """Mark suspect what the trainers of a launch had restored, in every tier that has it; see
        :func:`ckptd.checkpoint.doubt.doubt`. Raises :class:`NoCheckpoint` where nothing is known of such trainers."""
        found = self.watch.lives.last_of(launch)
        if found is None:
            raise NoCheckpoint(f"no trainer of launch {launch} has saved or restored here")
        life, asked = found
        tiers = await self.stores.open(asked)
        version = await doubt([tier.backend for tier in tiers], life.generation, by=f"launch {launch}", reason=reason)
        if version is not None:
            self._sparing.doubted(asked[0].url, launch, version, reason)
        return version

    # The end

    async def drain(self, deadline_seconds: float) -> None:
        """Take no new saves, and return when those under way are committed, and copied to the further tiers that take
        them; the daemon then ends. What there is no time for, by the bandwidth measured, is given up for the newest
        that there is time for; see :mod:`ckptd.daemon.triage`.

        Raises :class:`ckptd.errors.DeadlineExceeded`, naming what is not; the daemon ends all the same.
        """
        self.saves.draining = True
        log.info("draining: %d saves under way, at most %g s", len(self.saves.under_way()), deadline_seconds)
        until = time.monotonic() + deadline_seconds
        given_up: dict[str, str] = {}
        choosing = self.tasks.spawn(self._choose(until, given_up), "triage")
        try:
            await self.saves.idle(None, deadline_seconds)
            if given_up:
                named = "; ".join(f"{what}: {why}" for what, why in list(given_up.items())[:8])
                raise DeadlineExceeded(
                    f"given up for want of time: {named}",
                    hint="what is newer or fits is committed; give --deadline more",
                )
            if unfinished := await self.replication.settled(until - time.monotonic()):
                raise DeadlineExceeded(
                    f"not copied after {deadline_seconds:g} s: {', '.join(unfinished[:8])}",
                    hint="what is committed stays where it is, and the next start copies it",
                )
        finally:
            choosing.cancel()
            for url in await self.logs.flush(max(until - time.monotonic(), LOG_FLUSH_SECONDS)):
                log.error("%s: the newest rows of the training log are not stored", url)
            self.ending.set()

    async def _choose(self, until: float, given_up: dict[str, str]) -> None:
        """Give up what there is no time for, as soon as that can be told."""
        while (left := until - time.monotonic()) > 0:
            given_up |= (said := give_up(self.saves.under_way(), left))
            for what, why in said.items():
                log.error("given up, so that others get done: %s: %s", what, why)
            await asyncio.sleep(TRIAGE_SECONDS)

    async def close(self) -> None:
        """Let go of everything."""
        for session in list(self.sessions):
            session.close()
        self.monitor.close()
        await self.tasks.cancel()
        self.logs.close()
        if self._webhook is not None:
            await asyncio.to_thread(self._webhook.close)
        self.watch.close()
        self.saves.close()
        await self.stores.aclose()
        for owner in self._owners:
            owner.process.close()
        self.arenas.close()

    def status(self) -> dict[str, Any]:
        """For ``ckptd status``; small enough for one message."""
        return status_of(self)


def _pace(bytes_per_second: int | None) -> Pace | None:
    return None if bytes_per_second is None else Pace(bytes_per_second)
