"""How long it took from a death to the next step, and what of it was what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptd.wire.messages import TrainerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One restart. The parts add up to the whole."""

    detect_seconds: float
    """From the first death until the launcher knew."""
    restart_seconds: float
    """From then until all ranks had a session again: ending the group, waiting, starting, importing, building."""
    restore_seconds: float
    first_step_seconds: float
    """From the end of the restore to the end of the first step, on the last rank."""
    step: int
    """The first one of the rank that came last."""

    @property
    def seconds(self) -> float:
        """From the death to the first new step."""
        return self.detect_seconds + self.restart_seconds + self.restore_seconds + self.first_step_seconds

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s from failure to new step: detect {self.detect_seconds:.2f}, restart "
            f"{self.restart_seconds:.2f}, restore {self.restore_seconds:.2f}, first step {self.first_step_seconds:.2f}"
        )


def died_ns(dead: Sequence[TrainerLife], noticed_ns: int) -> int:
    """When the first of them died, by the daemon that saw their ends."""
    ends = [life.ended_ns for life in dead if 0 < life.ended_ns <= noticed_ns]
    return min(ends, default=noticed_ns)


def recovered(died: int, noticed: int, living: Sequence[TrainerLife]) -> Recovery:
    """The times, once each of the new group has done a step; all in nanoseconds of one clock."""
    began = max(max(life.began_ns for life in living), noticed)
    restoring = max(max(life.restoring_ns for life in living), began)
    restored = max(max(life.restored_ns for life in living), restoring)
    last = max(living, key=lambda life: life.first_step_ns)
    stepped = max(last.first_step_ns, restored)
    return Recovery(
        detect_seconds=(noticed - died) / 1e9,
        restart_seconds=(restoring - noticed) / 1e9,
        restore_seconds=(restored - restoring) / 1e9,
        first_step_seconds=(stepped - restored) / 1e9,
        step=last.last_step - last.steps + 1,
    )
