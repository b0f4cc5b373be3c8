"""One save: a fill of a slot on its way to storage."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ckptd.arena import SlotState
from ckptd.daemon.bases import Referred
from ckptd.daemon.fill import Fill
from ckptd.daemon.owner import Owner, Seat
from ckptd.daemon.source import SlotSource
from ckptd.format.keys import Version
from ckptd.format.records import Snapshot

FAILURES_KEPT = 16

Stage = Literal["queue", "write", "commit", "copy", "retention", "verify"]


@dataclass(eq=False)
class Save:
    """One fill of a slot on its way."""

    fill: Fill
    owner: Owner
    """Who filled it."""
    adopted: bool
    """It came with an arena that was handed in: an earlier daemon may have written it."""
    stage: Stage = "queue"
    run: str = ""
    """The run's id, once it has been read from the snapshot."""
    durable: tuple[Snapshot, bytes] | None = None
    """The snapshot and its receipt, once that is stored."""
    began_seconds: float = field(default_factory=time.monotonic)
    source: SlotSource | None = None
    referred: Referred = field(default_factory=Referred)
    """What of it is not stored, as another checkpoint has it."""
    likely: bool = True
    """Something of the next one may well be unchanged."""
    task: asyncio.Task[None] | None = None

    @property
    def version(self) -> Version:
        return self.fill.record.version

    @property
    def stored(self) -> bool:
        """The nearest tier has shard and receipt."""
        return self.durable is not None

    @property
    def resumed(self) -> bool:
        """The shard is durable; only the commit may be missing."""
        return self.fill.record.state is SlotState.DURABLE


@dataclass(frozen=True, slots=True)
class Failure:
    """For the status."""

    unix_seconds: float
    seat: Seat
    version: Version
    stage: Stage
    error: str


@dataclass(slots=True)
class Tally:
    """What has become of saves, and of what is done with checkpoints afterwards, since the daemon began."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    failures: deque[Failure] = field(default_factory=lambda: deque[Failure](maxlen=FAILURES_KEPT))
    committed: dict[str, Version] = field(default_factory=dict[str, Version])
    """Run → what was committed last."""
    committed_unix_seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Run → when."""
    verified_unix_seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Root → when a checkpoint there was read again and found sound."""
    bytes: int = 0
    """Of shards that became durable."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """Phase → how long saves were in it, all together."""

    on_failed: Callable[[Failure], None] | None = None
    """Is told of each failure."""

    def failed(self, seat: Seat, version: Version, stage: Stage, error: str) -> None:
        """Something went wrong that fails no training by itself: it is seen in the status, and people are told."""
        failure = Failure(time.time(), seat, version, stage, error)
        self.failures.append(failure)
        if self.on_failed is not None:
            self.on_failed(failure)
