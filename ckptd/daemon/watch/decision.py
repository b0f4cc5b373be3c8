"""Who hangs, and what is to be done: a pure function of what was seen, and of what was decided before.

A trainer is *stalled* when it has shown no progress for longer than the limit of its phase. It is not while the daemon
itself is at work for it, nor while another rank of its start, which is not ahead of it, has reason to be slow: it may
be waiting for that one. Each life of a trainer has a memory of its own here, which goes with it, so nothing of one life
can bear on the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckptd.daemon.watch.rules import WatchRules
from ckptd.pulse.page import Phase

PAUSE_SECONDS_MIN = 5.0
"""Between two looks, beyond what is usual: then it was the daemon that stood still, or the machine."""
SETTLE_TICKS = 2
"""How long the others of a start are given to be found stalled too, so that one hang is one report."""


class Start(NamedTuple):
    """One start of a run, as far as its ranks are on this node."""

    run: str
    launch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainer at one moment."""

    start: Start
    rank: int
    life: str
    """Which life; no two have the same."""
    beats: int
    """How many signs of progress it has given."""
    step: int
    phase: Phase
    age_seconds: float
    """Since the last one."""
    limit_seconds: float
    """For the phase that it is in."""
    busy: bool = False
    """The daemon is at work for it: what it waits for has limits of its own."""


@dataclass(frozen=True, slots=True)
class Action:
    """What is to be done. ``report``: gather what can be known of all ranks here, and tell people; ``end``: SIGKILL;
    ``recovered``: those of a report go on again."""

    what: Literal["report", "end", "recovered"]
    start: Start
    samples: tuple[Sample, ...]
    """Whom it concerns."""
    alone: bool = False
    """Other ranks of the start on this node go on."""


@dataclass(slots=True)
class _Stall:
    began_seconds: float
    beats: int
    reported_seconds: float | None = None
    ended: bool = False


class Watch:
    """The memory between decisions."""

    def __init__(self, rules: WatchRules) -> None:
        self._rules = rules
        self._stalls: dict[str, _Stall] = {}
        self._looked_seconds: float | None = None
        self._resumed_seconds = float("-inf")

    @property
    def stalled(self) -> frozenset[str]:
        """Lives that have been reported and have not moved since."""
        return frozenset(life for life, stall in self._stalls.items() if stall.reported_seconds is not None)

    def decide(self, now_seconds: float, samples: Sequence[Sample]) -> list[Action]:
        """``samples``: of all trainers that live. ``now_seconds`` never goes back."""
        self._note_pause(now_seconds)
        living = {sample.life for sample in samples}
        self._stalls = {life: stall for life, stall in self._stalls.items() if life in living}
        groups: defaultdict[Start, list[Sample]] = defaultdict(list)
        for sample in samples:
            groups[sample.start].append(sample)
        return [action for start, group in groups.items() for action in self._of_start(now_seconds, start, group)]

    def _note_pause(self, now_seconds: float) -> None:
        before, self._looked_seconds = self._looked_seconds, now_seconds
        if before is not None and now_seconds - before > self._rules.tick_seconds + PAUSE_SECONDS_MIN:
            self._resumed_seconds = now_seconds

    def _of_start(self, now_seconds: float, start: Start, group: Sequence[Sample]) -> Iterable[Action]:
        moved = [sample for sample in group if self._has_moved(sample)]
        if told := tuple(sample for sample in moved if sample.life in self.stalled):
            yield Action("recovered", start, told)
        for sample in moved:
            del self._stalls[sample.life]
        stalled = [sample for sample in group if self._is_stalled(now_seconds, sample, group)]
        for sample in stalled:
            self._stalls.setdefault(sample.life, _Stall(now_seconds, sample.beats))
        fresh = [sample for sample in stalled if self._stalls[sample.life].reported_seconds is None]
        settled = now_seconds - SETTLE_TICKS * self._rules.tick_seconds
        if any(self._stalls[sample.life].began_seconds <= settled for sample in fresh):
            for sample in fresh:
                self._stalls[sample.life].reported_seconds = now_seconds
            yield Action("report", start, tuple(fresh), alone=_others_go_on(group, stalled))
        if ending := tuple(sample for sample in stalled if self._is_to_end(now_seconds, sample)):
            for sample in ending:
                self._stalls[sample.life].ended = True
            yield Action("end", start, ending)

    def _has_moved(self, sample: Sample) -> bool:
        stall = self._stalls.get(sample.life)
        return stall is not None and stall.beats != sample.beats

    def _is_stalled(self, now_seconds: float, sample: Sample, group: Sequence[Sample]) -> bool:
        if sample.phase is Phase.CLOSED or sample.busy or not self._is_over(now_seconds, sample):
            return False
        return not any(self._excuses(now_seconds, other, sample) for other in group if other is not sample)

    def _is_over(self, now_seconds: float, sample: Sample) -> bool:
        age_seconds = min(sample.age_seconds, now_seconds - self._resumed_seconds)
        return age_seconds > sample.limit_seconds

    def _excuses(self, now_seconds: float, other: Sample, sample: Sample) -> bool:
        """Whether ``sample`` may be waiting for ``other``, which has reason to be slow."""
        slow = other.busy or other.phase not in (Phase.STEP, Phase.CLOSED)
        patient = other.limit_seconds > sample.limit_seconds and not self._is_over(now_seconds, other)
        return other.step <= sample.step and (other.busy or (slow and patient))

    def _is_to_end(self, now_seconds: float, sample: Sample) -> bool:
        stall = self._stalls[sample.life]
        reported = stall.reported_seconds
        due = reported is not None and now_seconds - reported >= self._rules.grace_seconds
        return self._rules.end and due and not stall.ended


def _others_go_on(group: Sequence[Sample], stalled: Sequence[Sample]) -> bool:
    others = [sample for sample in group if sample not in stalled and sample.phase is not Phase.CLOSED]
    return any(sample.age_seconds < sample.limit_seconds / 2 for sample in others)
