"""Trainings by a simulated clock: what the watchdog would see of them, and what it decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ckptd.daemon.watch.decision import Action, Sample, Start, Watch
from ckptd.daemon.watch.durations import Durations
from ckptd.daemon.watch.rules import WARM_STEPS, WatchRules
from ckptd.pulse import Phase

START = Start("file:///run", "launch#0")
RULES = WatchRules(end=True)


@dataclass(frozen=True)
class Stay:
    """So long in a phase; a STEP ends with one more step done."""

    phase: Phase
    seconds: float
    given: float = 0.0
    busy: bool = False


@dataclass
class Rank:
    """One trainer that follows a plan; a stay of infinite length is a hang."""

    rank: int
    plan: list[Stay]
    life: str = ""
    began: float = 0.0
    seen: float = 0.0
    beats: int = 1
    steps: int = 0
    current: Stay = field(default_factory=lambda: Stay(Phase.START, 0.0))

    def __post_init__(self) -> None:
        self.life = self.life or f"life of {self.rank}"

    def run_to(self, now: float, learned: dict[Phase, Durations]) -> None:
        """Pass what is over, as a page would show it at this moment."""
        while self.began + self.current.seconds <= now:
            self.began += self.current.seconds
            self.beats, self.seen = self.beats + 1, now
            if self.current.phase is not Phase.START and (self.current.phase is not Phase.STEP or self.warm):
                learned.setdefault(self.current.phase, Durations()).add(self.current.seconds)
            self.steps += self.current.phase is Phase.STEP
            self.current = self.plan.pop(0) if self.plan else Stay(Phase.CLOSED, float("inf"))

    @property
    def warm(self) -> bool:
        return self.steps > WARM_STEPS

    def sample(self, now: float, rules: WatchRules, learned: dict[Phase, Durations]) -> Sample:
        stay = self.current
        return Sample(
            start=START,
            rank=self.rank,
            life=self.life,
            beats=self.beats,
            step=self.steps,
            phase=stay.phase,
            age_seconds=now - self.seen,
            limit_seconds=rules.limit_seconds(stay.phase, learned, warm=self.warm, given=stay.given),
            busy=stay.busy,
        )


def simulate(
    ranks: Sequence[Rank], seconds: float, rules: WatchRules = RULES, *, skip: Iterable[tuple[float, float]] = ()
) -> list[tuple[float, Action]]:
    """All actions until then, each with its moment. ``skip``: between these moments nobody looked."""
    watch, learned, found = Watch(rules), dict[Phase, Durations](), list[tuple[float, Action]]()
    skipped = list(skip)
    for tick in range(int(seconds / rules.tick_seconds) + 1):
        now = tick * rules.tick_seconds
        if any(start <= now < stop for start, stop in skipped):
            continue
        for rank in ranks:
            rank.run_to(now, learned)
        samples = [rank.sample(now, rules, learned) for rank in ranks]
        found += [(now, action) for action in watch.decide(now, samples)]
    return found


def steady(count: int, seconds: float = 1.0) -> list[Stay]:
    return [Stay(Phase.STEP, seconds)] * count


def hang(phase: Phase = Phase.STEP, **fields: object) -> Stay:
    return replace(Stay(phase, float("inf")), **fields)  # type: ignore[arg-type]
