"""Lives of trainers: how far each one came, and when. Kept for some time after its end, for whoever starts the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from ckptd.daemon.owner import Owner
from ckptd.limits import LIVES_KEPT
from ckptd.pulse.page import Beat, Phase
from ckptd.wire.messages import TierOfRun, TrainerLife


class Course:
    """What the beats of one life add up to."""

    def __init__(self) -> None:
        self.began_ns = 0
        self.restoring_ns = 0
        """When the restore began that was seen last."""
        self.restored_ns = 0
        self.first_step_ns = 0
        self.last_step = 0
        self.steps = 0
        self._phase = Phase.START

    def add(self, beat: Beat) -> None:
        """The next beat of it that was seen."""
        at = beat.monotonic_ns
        self.began_ns = self.began_ns or at
        if beat.phase is Phase.RESTORE and self._phase is not Phase.RESTORE:
            self.restoring_ns = at
        if beat.phase is not Phase.RESTORE and self._phase is Phase.RESTORE:
            self.restored_ns = at
        if beat.phase is Phase.STEP and (self._phase is not Phase.STEP or beat.step != self.last_step):
            # After another phase a beat of the same step says only that the phase is over.
            self.steps += beat.step != self.last_step or not self.steps
            self.first_step_ns = self.first_step_ns or at
            self.last_step = beat.step
        self._phase = beat.phase


class Lives:
    """Those that are over, the newest :data:`LIVES_KEPT`."""

    def __init__(self) -> None:
        self._over: deque[tuple[TrainerLife, tuple[TierOfRun, ...]]] = deque(maxlen=LIVES_KEPT)

    def end(self, owner: Owner, generation: int, course: Course) -> None:
        """A life is over, just now."""
        life = told(owner, generation, course, ended_ns=time.monotonic_ns())
        self._over.append((life, owner.asked_tiers))

    def of(self, launch: str, living: Iterable[TrainerLife]) -> tuple[TrainerLife, ...]:
        """All of one launch, those that are over first."""
        over = [life for life, _ in self._over if life.launch == launch]
        return (*over, *(life for life in living if life.launch == launch))

    def last_of(self, launch: str) -> tuple[TrainerLife, tuple[TierOfRun, ...]] | None:
        """The newest of a launch that is over and had a generation, with where its run lies."""
        return next(
            (found for found in reversed(self._over) if found[0].launch == launch and found[0].generation), None
        )


def told(owner: Owner, generation: int, course: Course, *, ended_ns: int = 0) -> TrainerLife:
    """A life as it is told to others."""
    return TrainerLife(
        run=owner.seat.url,
        rank=owner.seat.rank,
        world=owner.world,
        launch=owner.launch,
        pid=owner.process.pid,
        generation=generation,
        began_ns=course.began_ns,
        restoring_ns=course.restoring_ns,
        restored_ns=course.restored_ns,
        first_step_ns=course.first_step_ns,
        ended_ns=ended_ns,
        last_step=course.last_step,
        steps=course.steps,
    )
