"""The watchdog: reads pages, asks :class:`~ckptd.daemon.watch.decision.Watch` what is to be done, and does it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ckptd.checkpoint.concurrency import in_thread
from ckptd.daemon.owner import Owner
from ckptd.daemon.tasks import Tasks
from ckptd.daemon.watch.alerts import Alert, AlertKind, Alerts, Level, about_machine
from ckptd.daemon.watch.decision import Action, Sample, Start, Watch
from ckptd.daemon.watch.ending import end
from ckptd.daemon.watch.evidence import gather
from ckptd.daemon.watch.learned import Learned
from ckptd.daemon.watch.lives import Lives, told
from ckptd.daemon.watch.reports import write_report
from ckptd.daemon.watch.rules import WatchRules
from ckptd.daemon.watch.stragglers import lagging
from ckptd.daemon.watch.watched import Watched
from ckptd.errors import first_line
from ckptd.health.sightings import Sighting
from ckptd.limits import HANG_SIGHTINGS_SECONDS
from ckptd.pulse.page import Beat, Phase
from ckptd.wire.messages import TrainerLife

log = logging.getLogger(__name__)


class Watchdog:
    """Watches over all trainers of one daemon."""

    def __init__(
        self,
        rules: WatchRules,
        state_path: Path,
        busy: Callable[[Owner], bool],
        noticed: Callable[[float], Sequence[Sighting]],
        tasks: Tasks,
    ) -> None:
        """``busy``: the daemon is at work on a snapshot that this trainer has sealed. ``noticed``: what was seen of
        this machine since a Unix time in seconds, the newest first."""
        self.rules = rules
        self.alerts = Alerts()
        self.counts: Counter[str] = Counter()
        """What was done; in a dry run, what would have been."""
        self.learned = Learned(state_path / "limits")
        self.lives = Lives()
        self._reports = state_path / "hangs"
        self._busy = busy
        self._noticed = noticed
        self._told: frozenset[tuple[str, str]] = frozenset()
        """The findings about this machine that people have heard of."""
        self._tasks = tasks
        self._watched: dict[Owner, Watched] = {}
        self._watch = Watch(rules)
        self._lagging: dict[Start, frozenset[int]] = {}
        self._reporting: dict[Start, asyncio.Task[None]] = {}

    # Trainers

    def take(self, owner: Owner, part: str, fd: int, signal: int) -> None:
        """A trainer hands in what it is watched by. Takes over ``fd``. Raises :class:`ProtocolError`."""
        self._watched.setdefault(owner, Watched(owner)).take(part, fd, signal)

    def left(self, owner: Owner) -> None:
        """Its session is over, and so is this life of it, whatever it was suspected of."""
        if (watched := self._watched.pop(owner, None)) is not None:
            self._read(watched, time.monotonic())
            self.lives.end(owner, watched.generation, watched.course)
            watched.close()

    def lives_of(self, launch: str) -> tuple[TrainerLife, ...]:
        """Trainers of a launch, dead and alive."""
        living = [watched for watched in self._watched.values() if watched.owner.launch == launch]
        for watched in living:
            self._read(watched, time.monotonic())
        return self.lives.of(launch, [told(each.owner, each.generation, each.course) for each in living])

    def last(self, owner: Owner) -> Beat | None:
        """Its newest beat."""
        beats = watched.recent(1) if (watched := self._watched.get(owner)) is not None else []
        return beats[-1] if beats else None

    def limit_seconds(self, owner: Owner) -> float | None:
        """Of the phase that it is in."""
        watched = self._watched.get(owner)
        return None if watched is None or watched.last is None else self._limit(watched, watched.last)

    def of_start(self, run: str, launch: str) -> list[Watched]:
        """Trainers of one start of a run that live on this node."""
        return [watched for watched in self._watched.values() if _start(watched.owner) == Start(run, launch)]

    # Looking

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while self.rules.active:
            await asyncio.sleep(self.rules.tick_seconds)
            try:
                self._look(time.monotonic())
            except Exception:
                log.exception("the watchdog could not look")

    def _look(self, now_seconds: float) -> None:
        for watched in self._watched.values():
            self._read(watched, now_seconds)
        seen = [
            (self._sample(watched, watched.last, now_seconds), watched)
            for watched in self._watched.values()
            if watched.last is not None
        ]
        for action in self._watch.decide(now_seconds, [sample for sample, _ in seen]):
            self._do(action, [(sample, watched) for sample, watched in seen if sample.start == action.start])
        self._compare([watched for _, watched in seen])
        self._tell_of_machine()
        self.learned.keep(now_seconds)

    def _read(self, watched: Watched, now_seconds: float) -> None:
        for phase, seconds in watched.read(now_seconds):
            self.learned.add(watched.owner.seat.url, phase, seconds)

    def _sample(self, watched: Watched, beat: Beat, now_seconds: float) -> Sample:
        owner = watched.owner
        return Sample(
            start=_start(owner),
            rank=owner.seat.rank,
            life=watched.life,
            beats=beat.number,
            step=beat.step,
            phase=beat.phase,
            age_seconds=now_seconds - watched.seen_seconds,
            limit_seconds=self._limit(watched, beat),
            busy=beat.phase is Phase.SAVE and self._busy(owner),
        )

    def _limit(self, watched: Watched, beat: Beat) -> float:
        learned = self.learned.of(watched.owner.seat.url)
        return self.rules.limit_seconds(beat.phase, learned, warm=watched.warm, given=beat.limit_seconds)

    # Acting

    def _do(self, action: Action, group: Sequence[tuple[Sample, Watched]]) -> None:
        concerned = [watched for sample, watched in group if sample in action.samples]
        match action.what:
            case "report":
                self.counts["hangs"] += 1
                for rung in ("notify", "dump"):
                    self.counts[rung] += bool(getattr(self.rules, rung))
                if self.rules.dry_run:
                    self._log_only(action)
                else:
                    task = self._tasks.spawn(self._report(action, group), f"report of {action.start.run}")
                    self._reporting[action.start] = task
                    task.add_done_callback(self._reported)
            case "end":
                self.counts["end"] += len(concerned)
                if self.rules.dry_run:
                    self._log_only(action)
                else:
                    self._tasks.spawn(self._end(action, concerned), f"end of a start of {action.start.run}")
            case "recovered":
                self.counts["recovered"] += 1
                if not self.rules.dry_run:
                    self._tell("recovered", "info", f"{_ranks(action)} went on", action, concerned)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._reporting = {start: other for start, other in self._reporting.items() if other is not task}

    def _log_only(self, action: Action) -> None:
        log.warning("dry run: would %s for %s of %s", action.what, _ranks(action), action.start.run)

    async def _report(self, action: Action, group: Sequence[tuple[Sample, Watched]]) -> None:
        noticed = self._noticed(time.time() - HANG_SIGHTINGS_SECONDS)
        report = await gather(action, group, noticed, dump=self.rules.dump)
        path = ""
        try:
            path = str(await in_thread(write_report, self._reports, report))
        except OSError as error:
            log.error("the report of a hang cannot be written: %s", first_line(error))
        concerned = [watched for sample, watched in group if sample in action.samples]
        if self.rules.notify:
            self._tell("hang", "error", report.message, action, concerned, path)
        else:
            log.warning("%s; report: %s", report.message, path or "none")

    async def _end(self, action: Action, concerned: Iterable[Watched]) -> None:
        if (reporting := self._reporting.get(action.start)) is not None:
            await asyncio.wait([reporting])  # evidence first
        seen = {sample.life: sample.beats for sample in action.samples}
        ending = [watched for watched in concerned if watched.count == seen[watched.life]]
        if not ending:
            return
        self._tell("ended", "error", f"{_ranks(action)} were ended", action, ending)
        if left := await end(ending, "no progress"):
            ranks = ", ".join(str(watched.owner.seat.rank) for watched in left)
            message = f"rank {ranks} does not end: process 1 of its container, or waiting in the kernel"
            self._tell("not_ended", "error", message, action, left)

    def _compare(self, all_watched: Sequence[Watched]) -> None:
        starts: defaultdict[Start, dict[int, Watched]] = defaultdict(dict)
        for watched in all_watched:
            starts[_start(watched.owner)][watched.owner.seat.rank] = watched
        before, self._lagging = self._lagging, {}
        for start, ranks in starts.items():
            lagged = before.get(start, frozenset())
            steps = {rank: watched.recent_steps for rank, watched in ranks.items()}
            times = lagging(steps, self.rules.straggler_ratio, lagged)
            self._lagging[start] = frozenset(times)
            for rank in sorted(times.keys() ^ lagged):
                self._tell_lag(start, rank, times.get(rank), ranks)

    def _tell_lag(self, start: Start, rank: int, times: float | None, ranks: dict[int, Watched]) -> None:
        self.counts["stragglers"] += times is not None
        if self.rules.dry_run or not self.rules.notify or rank not in ranks:
            return
        action = Action("report", start, ())
        if times is None:
            self._tell("caught_up", "info", f"rank {rank} is as fast as the others", action, [ranks[rank]])
        else:
            message = f"rank {rank} lags: its steps take {times:.1f} times as long as those of the others"
            self._tell("straggler", "warning", message, action, [ranks[rank]])

    def _tell(
        self,
        kind: AlertKind,
        level: Level,
        message: str,
        action: Action,
        concerned: Sequence[Watched],
        report: str = "",
    ) -> None:
        self.alerts.raise_(
            Alert(
                kind=kind,
                level=level,
                message=message,
                run=action.start.run,
                launch=action.start.launch,
                generation=max((watched.generation for watched in concerned), default=0),
                ranks=tuple(sorted(watched.owner.seat.rank for watched in concerned)),
                report=report,
            )
        )

    def _tell_of_machine(self) -> None:
        """Each finding about this machine once: it may be why a training ends soon."""
        noticed = {(sighting.place, sighting.finding.subject): sighting for sighting in reversed(self._noticed(0.0))}
        told, self._told = self._told, frozenset(noticed)
        for key, sighting in noticed.items():
            if key not in told:
                self.alerts.raise_(about_machine(sighting))

    # For people

    def status(self, listed: int) -> dict[str, Any]:
        """For ``ckptd status``; ``listed``: of each kind, at most."""
        limits = {
            run: {
                phase.name.lower(): round(self._typical(run, phase), 3) for phase in Phase if phase is not Phase.CLOSED
            }
            for run in list(self.learned.runs)[-listed:]
        }
        stalled = [watched for watched in self._watched.values() if watched.life in self._watch.stalled]
        return {
            "actions": [rung for rung in ("notify", "dump", "end") if getattr(self.rules, rung)],
            "dry_run": self.rules.dry_run,
            "counts": dict(self.counts),
            "limits_seconds": limits if listed else {},
            "stalled": [str(watched.owner.seat) for watched in stalled[:listed]],
            "alerts": [alert.plain() for alert in list(self.alerts.recent)[-listed:]] if listed else [],
        }

    def _typical(self, run: str, phase: Phase) -> float:
        return self.rules.limit_seconds(phase, self.learned.of(run), warm=True, given=0)

    def close(self) -> None:
        """Keep what was learned, and give all descriptors back."""
        for owner in list(self._watched):
            self.left(owner)
        self.learned.keep(time.monotonic(), at_once=True)


def _start(owner: Owner) -> Start:
    return Start(owner.seat.url, owner.launch)


def _ranks(action: Action) -> str:
    return "rank " + ", ".join(str(sample.rank) for sample in action.samples[:16])
