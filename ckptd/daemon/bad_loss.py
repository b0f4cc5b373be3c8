"""What is done when a training's loss goes bad: people are told, the last checkpoint from before is pinned, and where
that is wished for the training goes back to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ckptd.checkpoint.going_back import mark_from, pin_before
from ckptd.checkpoint.processes import holder_here
from ckptd.checkpoint.selectors import spoken
from ckptd.daemon.owner import Owner
from ckptd.daemon.watch.alerts import Alert, Level
from ckptd.daemon.watch.ending import end
from ckptd.daemon.watch.watched import Watched
from ckptd.errors import first_line
from ckptd.format.keys import Version
from ckptd.limits import BAD_LOSS_PINS_MAX, COMMIT_SECONDS, GO_BACKS_MAX
from ckptd.pulse.loss_rules import BadLoss, LossJudge
from ckptd.pulse.rows import Row
from ckptd.storage import Backend

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often it is looked what of a training that goes back is still being committed."""


class BadLosses:
    """Of all trainers of one daemon, by the rules that each has brought."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        tell: Callable[[Alert], None],
        under_way: Callable[[str], Iterable[Version]],
        of_start: Callable[[str, str], list[Watched]],
    ) -> None:
        """``under_way``: a run's URL → what is being saved; ``of_start``: run and launch → trainers that live."""
        self._spawn = spawn
        self._tell = tell
        self._under_way = under_way
        self._of_start = of_start
        self._judges: WeakKeyDictionary[Owner, LossJudge] = WeakKeyDictionary()
        self._gone_back: Counter[str] = Counter()
        """Run → how often."""
        self._pinned: defaultdict[str, set[Version]] = defaultdict(set)
        """Run → what was pinned."""
        self._acting: Counter[Owner] = Counter()
        self._going_back: set[tuple[str, int]] = set()
        """Runs and generations that are."""

    def hear(self, owner: Owner, generation: int, rows: Sequence[Row]) -> None:
        """What a trainer has reported, in order."""
        if owner.on_bad_loss == "nothing":
            return
        judge = self._judges.get(owner)
        if judge is None:
            judge = self._judges[owner] = LossJudge(owner.loss_rules)
        for row in rows:
            for bad in judge.hear(row.step, row.values):
                self._spawn(self._act(owner, generation, bad), f"bad loss of {owner.seat}")

    def busy_owners(self) -> set[Owner]:
        """Whose stores are in use."""
        return set(self._acting)

    async def _act(self, owner: Owner, generation: int, bad: BadLoss) -> None:
        since = f", and it has been bad since step {bad.first_step}" if bad.step != bad.first_step else ""
        found = f"at step {bad.step} {bad.what}{since}"
        say = partial(self._say, owner, generation)
        say("error", found)  # before anything that may take time
        if owner.on_bad_loss == "alert" or not generation:
            return
        if len(self._pinned[owner.seat.url]) >= BAD_LOSS_PINS_MAX:
            say("warning", f"{BAD_LOSS_PINS_MAX} checkpoints have been pinned for that already, and no more are")
            return
        self._acting[owner] += 1
        try:
            version = await pin_before(_backends(owner), generation, bad.first_step, by=_by(), reason=found)
            if version is None:
                say("warning", f"no good checkpoint from before step {bad.first_step} is committed")
                return
            self._pinned[owner.seat.url].add(version)
            say("warning", f"pinned step {spoken(version)}, the last good one from before step {bad.first_step}")
            if owner.on_bad_loss == "go_back":
                await self._go_back(owner, generation, bad.first_step, version, found)
        except Exception as error:
            say("error", f"nothing could be done about it: {first_line(error)}")
        finally:
            self._acting -= Counter([owner])

    def _say(self, owner: Owner, generation: int, level: Level, message: str) -> None:
        self._tell(
            Alert(
                kind="bad_loss",
                level=level,
                message=f"rank {owner.seat.rank}: {message}",
                run=owner.seat.url,
                launch=owner.launch,
                generation=generation,
                ranks=(owner.seat.rank,),
            )
        )

    async def _go_back(self, owner: Owner, generation: int, step: int, version: Version, reason: str) -> None:
        """Mark what comes from ``step`` on, and end the trainers, so that their next start takes ``version``."""
        url = owner.seat.url
        if (url, generation) in self._going_back:
            return
        if self._gone_back[url] >= GO_BACKS_MAX:
            self._say(owner, generation, "error", f"the run has gone back {GO_BACKS_MAX} times, and does not again")
            return
        self._gone_back[url] += 1
        self._going_back.add((url, generation))
        try:
            await self._mark(owner, generation, step, reason)
            ending = self._of_start(url, owner.launch)
            self._say(owner, generation, "error", f"ended, to go back to step {spoken(version)}")
            if left := await end(ending, reason):
                ranks = ", ".join(str(watched.owner.seat.rank) for watched in left)
                self._say(owner, generation, "error", f"rank {ranks} does not end")
            await self._mark_late(owner, generation, step, reason)
        finally:
            self._going_back.discard((url, generation))

    async def _mark(self, owner: Owner, generation: int, step: int, reason: str) -> None:
        also = self._under_way(owner.seat.url)
        for version in await mark_from(_backends(owner), generation, step, also, by=_by(), reason=reason):
            log.warning("%s: %s is marked unhealthy: %s", owner.seat.url, version, reason)

    async def _mark_late(self, owner: Owner, generation: int, step: int, reason: str) -> None:
        """Of what was sealed before the end, too."""
        until = time.monotonic() + COMMIT_SECONDS
        under_way = True
        while under_way and time.monotonic() < until:
            under_way = any(version.generation == generation for version in self._under_way(owner.seat.url))
            await self._mark(owner, generation, step, reason)
            await asyncio.sleep(LOOK_SECONDS)


def _backends(owner: Owner) -> list[Backend]:
    return [tier.backend for tier in owner.tiers]


def _by() -> str:
    return holder_here("watches the loss")
