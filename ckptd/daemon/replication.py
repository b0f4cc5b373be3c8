"""All further tiers of all runs of one daemon: which links there are, for how long, and how they fare."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from ckptd.daemon.bases import Bases
from ckptd.daemon.commits import Commits
from ckptd.daemon.link import Link
from ckptd.daemon.owner import Owner
from ckptd.daemon.retiring import Retiring
from ckptd.daemon.save import Tally
from ckptd.daemon.tier import Tier
from ckptd.daemon.verifying import Verifying
from ckptd.errors import first_line
from ckptd.format.keys import Version
from ckptd.limits import COMMIT_SECONDS, COPY_LINGER_SECONDS

log = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.1


class Replication:
    """Links live while a trainer of theirs is connected, and after that until they have done what they can."""

    def __init__(
        self,
        commits: Commits,
        tally: Tally,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        verifying: Verifying,
        bases: Bases,
        grace_seconds: float,
    ) -> None:
        """``grace_seconds``: of retention."""
        self._verifying = verifying
        self._bases = bases
        self._commits = commits
        self._tally = tally
        self._spawn = spawn
        self._links: dict[tuple[str, int], tuple[Link, asyncio.Task[None]]] = {}
        self.retiring = Retiring(spawn, self.held, tally, grace_seconds)

    @property
    def links(self) -> list[Link]:
        """All of them."""
        return [link for link, _ in self._links.values()]

    def arrived(self, owner: Owner) -> None:
        """A trainer sits in its seat: what its further tiers lack is copied there."""
        for tier in owner.tiers[1:]:
            self._link(owner, tier.number)

    def committed(self, owner: Owner, tier: Tier, run: str, version: Version) -> None:
        """A tier has a new checkpoint: verification and retention there, and on to the next tier."""
        here: Collection[int] = ()
        if tier.number + 1 < len(owner.tiers):
            link = self._link(owner, tier.number + 1)
            here = link.members
            link.nudge(version)
        self._verifying.soon(owner, tier, run, version, here)
        self.retiring.soon(owner, tier, run, version)

    def _link(self, owner: Owner, number: int) -> Link:
        key = owner.seat.url, number
        found = self._links.get(key)
        if found is None:
            link = Link(number, self._commits, self._bases, self._copied, self._failed)
            link.join(owner)
            found = self._links[key] = link, self._spawn(link.run(), f"copies of {owner.seat.url} to tier {number}")
        elif found[0].members.get(owner.seat.rank) is not owner:
            found[0].join(owner)
        return found[0]

    def _copied(self, owner: Owner, tier: Tier, run: str, version: Version) -> None:
        self._tally.counts["copied"] += 1
        self.committed(owner, tier, run, version)
        nearer = owner.tiers[tier.number - 1]
        self.retiring.soon(owner, nearer, run, version)  # of what was held for the copy

    def _failed(self, link: Link, error: Exception) -> None:
        """An event, a counter and a warning. No training ends for it."""
        self._tally.counts["copies_failed"] += 1
        log.warning("%s is not copied to %s: %s", link.version or link.near, link.target.backend.url, first_line(error))
        if link.failures == 1 or link.version is not None:
            version = link.version or link.near or Version(0, 0)
            self._tally.failed(link.owner.seat, version, "copy", first_line(error))

    def held(self, url: str, line: Sequence[Version]) -> Mapping[Version, str]:
        """What retention in a tier must leave for the next one: at most two checkpoints for each link."""
        found: dict[Version, str] = {}
        for link in self.links:
            if link.source.backend.url == url:
                found.update(link.held(line))
        return found

    # Ending

    def busy_owners(self) -> set[Owner]:
        """Whose stores are in use."""
        return {owner for link in self.links for owner in link.members.values()}

    @property
    def busy(self) -> bool:
        """Something is being copied, or is due."""
        return any(link.state != "idle" for link in self.links)

    def tidy(self) -> None:
        """Let go of links whose trainers have left, once they have nothing to do or have failed for long."""
        now = time.monotonic()
        for key, (link, task) in list(self._links.items()):
            if any(owner.connected for owner in link.members.values()) or link.state in ("due", "copying"):
                continue
            silent = now - link.news_seconds
            if link.state == "failing" and silent < COMMIT_SECONDS:
                continue
            if 0 not in link.members and silent < COPY_LINGER_SECONDS:
                continue
            if link.state == "failing":
                log.warning(
                    "%s is left behind until the next start: %s", link.target.backend.url, link.error or "it failed"
                )
            task.cancel()
            del self._links[key]

    async def settled(self, deadline_seconds: float) -> list[str]:
        """Wait until nothing more is due, or the tiers fail. Returns what is unfinished after that time, in words."""
        until = time.monotonic() + deadline_seconds
        while True:
            working = [link for link in self.links if link.state in ("due", "copying")]
            if not working or time.monotonic() >= until:
                return [f"{link.version or link.near} to {link.target.backend.url}" for link in working]
            await asyncio.sleep(IDLE_POLL_SECONDS)
