"""The steps of the protocol, by the names of their points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Who = Literal["trainer", "daemon"]


@dataclass(frozen=True)
class Step:
    """A point that a trainer or the daemon passes."""

    who: Who
    point: str
    begins: Literal["", "trainer", "daemon", "both"] = ""
    """Comes only where these have just started."""
    of_rank_0: bool = False


def _steps(who: Who, *points: str, begins: Literal["", "trainer", "daemon", "both"] = "") -> tuple[Step, ...]:
    return tuple(Step(who, point, begins) for point in points)


STEPS = (
    # A trainer starts, and takes what its predecessor has left in memory.
    *_steps("trainer", "after send hello", "after receive welcome", "before send borrow_arena", begins="trainer"),
    *_steps("daemon", "after receive hello", "before send welcome", "before send arena_granted", begins="trainer"),
    Step("trainer", "after rename lease", "trainer", of_rank_0=True),
    Step("trainer", "before link generation", "trainer", of_rank_0=True),
    Step("trainer", "after link generation", "trainer", of_rank_0=True),
    # Everybody starts, from storage.
    *_steps("trainer", "after send make_arena", "after receive arena_granted", begins="both"),
    *_steps("daemon", "after receive make_arena", begins="both"),
    Step("trainer", "before rename mark", "both", of_rank_0=True),
    # A daemon takes the place of a dead one.
    *_steps("trainer", "before send hand_arena", "after send hand_arena", begins="daemon"),
    *_steps("daemon", "after receive hand_arena", begins="daemon"),
    # A snapshot is taken.
    *_steps("trainer", "before move to FILLING", "after move to FILLING", "after send filling", "before send filled"),
    *_steps("trainer", "before move to SEALED", "after move to SEALED", "after send sealed"),
    *_steps("trainer", "after receive durable", "after receive committed"),
    # It is written.
    *_steps("daemon", "after receive filling", "after receive sealed", "after create shard", "after write shard"),
    *_steps("daemon", "before fsync shard", "before rename shard", "after rename shard", "after fsync_directory shard"),
    *_steps("daemon", "before link receipt", "after link receipt", "after fsync_directory receipt"),
    *_steps("daemon", "before move to DURABLE", "after move to DURABLE", "before send durable"),
    # It is committed, read again, and others go for it.
    *_steps("daemon", "before link manifest", "after link manifest", "after fsync_directory manifest"),
    *_steps("daemon", "before send committed", "before rename mark"),
    *_steps("daemon", "before link tombstone", "after link tombstone", "before unlink manifest"),
    *_steps("daemon", "after unlink manifest", "after unlink receipt", "after unlink shard"),
)
