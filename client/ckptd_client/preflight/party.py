"""Ranks that talk through a store of torch, and go on without those that fall silent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store


class Party:
    """All ranks of one preflight. Everything said stays said; nobody leads, so anybody may be missing."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        """``store``: nothing else of this world is below its prefix."""
        self.store = store
        self.rank = rank
        self.world = world
        self.silent: set[int] = set()
        """Those that did not say in time what they were to say; they are waited for no more."""

    def say(self, topic: str, value: str = "") -> None:
        """Let all others hear it."""
        self.store.set(f"{topic}/{self.rank}", value)

    def hear(self, topic: str, seconds: float) -> dict[int, bytes]:
        """What each rank says to a topic, of those that say it within ``seconds``; the others are silent from here on.
        Ranks that were silent before are heard only if they have spoken by now."""
        awaited = set(range(self.world)) - self.silent
        if not self.wait((f"{topic}/{rank}" for rank in awaited), seconds):
            self.silent |= {rank for rank in awaited if not self.store.check([f"{topic}/{rank}"])}
        late = {rank for rank in self.silent if self.store.check([f"{topic}/{rank}"])}
        said = sorted((awaited - self.silent) | late)
        return dict(zip(said, self.store.multi_get([f"{topic}/{rank}" for rank in said]), strict=True)) if said else {}

    def wait(self, keys: Iterable[str], seconds: float) -> bool:
        """Whether all these keys are there within so many seconds."""
        try:
            self.store.wait(list(keys), timedelta(seconds=max(seconds, 0.001)))
        except DistStoreError:
            return False
        return True

    def agree(self, topic: str, value: str) -> bytes:
        """The value of whoever comes first, for all."""
        self.store.compare_set(topic, "", value)
        return self.store.get(topic)

    def agreed(self, topic: str) -> bool:
        """Whether somebody has come."""
        return self.store.check([topic])


class Deadline:
    """One span of time for several steps."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """At least a millisecond, so that a wait may still find what is there."""
        return max(self._until - time.monotonic(), 0.001)
