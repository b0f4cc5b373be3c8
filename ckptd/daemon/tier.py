"""The tiers of a run as a daemon serves them: where each is, what goes there, who sees it; and a checkpoint in one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ckptd.checkpoint.keep import Keep
from ckptd.format.keys import Version, exchanged_key, receipt_key
from ckptd.storage import Backend


@dataclass(frozen=True, slots=True)
class Interval:
    """Which checkpoints of the nearer tier a further one gets. Neither: each one, as long as the tier keeps up."""

    every_steps: int | None = None
    every_seconds: float | None = None

    def choose(
        self, line: Sequence[Version], here: Collection[Version], there: Collection[Version | None], *, time_is_up: bool
    ) -> Version | None:
        """What to copy next: of what is newer than everything there, the first checkpoint at or after the last multiple
        of ``every_steps``. What was overtaken is left out, so that a slow tier is never further behind than one copy.

        ``line``: newest first, of both tiers together. ``time_is_up``: ``every_seconds`` have passed.
        """
        newest_there = next((version for version in line if version in there), None)
        newer = [version for version in takewhile(lambda version: version != newest_there, line) if version in here]
        if not newer:
            return None
        if newest_there is None and self.every_steps is None:
            return newer[0]
        if self.every_seconds is not None and time_is_up:
            return newer[0]
        if self.every_steps is None:
            return newer[0] if self.every_seconds is None else None
        due = newer[0].step // self.every_steps
        if newest_there is not None and newest_there.step // self.every_steps == due:
            return None
        return next(version for version in reversed(newer) if version.step // self.every_steps == due)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where the nodes leave each other the receipts of a tier that is a disk of its own on each of them."""

    backend: Backend
    """The nearest tier that all of them see."""
    tier: int

    def key(self, key: str) -> str:
        """Where an object of the tier lies for the others."""
        return exchanged_key(self.tier, key)


@dataclass(frozen=True, slots=True)
class Tier:
    """One root of a run. Nearest is number 0."""

    number: int
    backend: Backend = field(repr=False)
    keep: Keep
    reading: Backend = field(repr=False)
    """The same place, for copies to the next tier: with limits of its own, so that saves do not wait for them."""
    verifying: Backend = field(repr=False)
    """The same place, for reading again what was committed, at a rate of its own."""
    options: Mapping[str, Any] = field(repr=False)
    """By which it was opened; secrets may be among them."""
    shared: bool = True
    """All ranks see the same place; else each node has a disk of its own."""
    interval: Interval = Interval()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Which checkpoint of which run is to be committed."""

    backend: Backend
    version: Version
    world: int
    run: str
    """Its id; empty where a snapshot was too broken to say."""
    exchange: Exchange | None = None
    """Where the other nodes' receipts are, where each node has a disk of its own: then every node commits."""

    @property
    def name(self) -> tuple[str, Version]:
        return self.backend.url, self.version

    def place(self, rank: int) -> tuple[Backend, str]:
        """Where the daemons of other nodes look for a rank's receipt."""
        key = receipt_key(self.version, rank, self.world)
        return (self.backend, key) if self.exchange is None else (self.exchange.backend, self.exchange.key(key))

    def __str__(self) -> str:
        return f"step {self.version.step} of generation {self.version.generation} at {self.backend.url}"
