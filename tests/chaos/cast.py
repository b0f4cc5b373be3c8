"""The processes of one run: started, listened to, stopped and killed, and what has to hold afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.chaos.children import Child, Event, Nursery, daemons_at, listen
from tests.chaos.promises import Promises, in_order
from tests.chaos.stored import Broken, Stored

DEADLINE_SECONDS = 90.0
"""For whatever has to happen; a busy machine is slow."""
KEPT_ALL = 10_000
DAEMON_DESCRIPTORS_MAX = 60
DAEMON_THREADS_MAX = 60
DAEMON_GROWTH_BYTES_MAX = 96 << 20


@dataclass
class Tally:
    """What a story, or many, came to."""

    stories: int = 0
    kills: int = 0
    stops: int = 0
    restores: int = 0
    checkpoints: int = 0
    points: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """Where processes stood still at a named step → how often."""
    passed: set[str] = field(default_factory=set[str])
    """All steps that any process came by."""

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in ("stories", "kills", "stops", "restores", "checkpoints"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for point, count in other.points.items():
            self.points[point] += count
        self.passed |= other.passed


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the trainers do."""

    world: int = 1
    keep: int = KEPT_ALL
    tensors: int = 3
    elements: int = 5000
    """Large enough for their copies to overlap."""
    wait: str = ""
    """For which state of each save they wait; empty: for none."""
    pause_seconds: float = 0.05
    slots: int = 2
    start_daemon: bool = False
    """Where none answers, by exec, as users' trainers do."""


class Cast:
    """A context manager: whatever still lives at its end is killed."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        training: Training,
        server: S3Endpoint | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """``folder``: short, as a socket goes there; made here. ``settings``: of the daemons that are forked."""
        folder.mkdir(mode=0o700)
        (folder / "s").mkdir(mode=0o700)
        self.folder = folder
        self.training = training
        self.tally = Tally(stories=1)
        self.promises = Promises()
        self.stored = Stored(server.prefix() if server else f"file://{folder / 'run'}", server)
        self.trainers: list[Child] = []
        self.zombies: list[Child] = []
        """Trainers whose seats others have, or are to have."""
        self.daemons: list[Child] = []
        self.may_refuse: set[Child] = set()
        """Trainers that may end with an error of ckptd's."""
        self._armed: set[Child] = set()
        self._nursery = nursery
        self._socket = folder / "s" / "d.sock"
        self._settings = settings or {}
        self._memory_bytes: dict[int, int] = {}
        self._only_trainers_hold = False
        """They have yet to hand their arenas to a new daemon."""

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.add_note(f"processes wrote to {self.folder}/log")
        for child in self.everybody:
            child.close()
        for daemon in self._daemons_of_trainers():
            daemon.kill()
            with contextlib.suppress(psutil.Error):
                daemon.wait(10)
        self.stored.close()

    @property
    def everybody(self) -> list[Child]:
        return [*self.trainers, *self.zombies, *self.daemons]

    # Beginnings

    def start_daemon(self, stop_at: int | str = 0) -> None:
        config = {"kind": "daemon", "socket": str(self._socket), "log": f"{self.folder}/log", "stop_at": stop_at}
        self.daemons.append(self._nursery.child({**config, "settings": self._settings}))
        if stop_at:
            self._armed.add(self.daemons[-1])

    def start_trainers(
        self, *, takeover: bool = False, steps: int | None = None, stop_at: dict[int, int | str] | None = None
    ) -> None:
        """One for each rank, and wait until they have restored, or somebody stands still. ``steps``: after so many
        they end. ``stop_at``: rank → point."""
        launch = uuid.uuid4().hex
        for rank in range(self.training.world):
            config = {
                "kind": "trainer",
                "url": self.stored.url,
                "storage_options": self.stored.options,
                "socket": str(self._socket),
                "log": f"{self.folder}/log",
                "rank": rank,
                "launch": launch,
                "takeover": takeover,
                "on_full": "wait",
                "in_step": "",
                "max_wait": 0.5 if steps is None else 60.0,
                "steps": 100_000 if steps is None else steps,
                "stop_at": (stop_at or {}).get(rank, 0),
                **vars(self.training),
            }
            self.trainers.append(self._nursery.child(config))
            if config["stop_at"]:
                self._armed.add(self.trainers[-1])
        self.listen(lambda: self.all_said("restored") or self.one_stopped(), "the restore")
        if not self.one_stopped():
            self.tally.restores += self.training.world

    def arm(self, child: Child, point: int | str) -> None:
        """It is to stand still at the next point of that name, or after so many."""
        self._armed.add(child)
        child.counter.stop_at(point if isinstance(point, str) else child.counter.passed + point)

    # News

    def all_said(self, event: str) -> bool:
        return all(child.last(event) is not None for child in self.trainers)

    def one_stopped(self) -> bool:
        return any(child.stopped for child in (*self.trainers, *self.daemons))

    def daemon_alive(self) -> bool:
        return any(child.alive for child in self.daemons) or bool(self._daemons_of_trainers())

    def listen(self, until: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Until the condition holds. Raises :class:`Broken` where it does not in time, and where a trainer ends."""
        heard = self.everybody

        def condition() -> bool:
            for child in self.trainers:
                if child not in self.may_refuse and child.heard_all and child.last("end") is None and not child.alive:
                    raise Broken(f"a trainer ended during {what}: {child.events[-3:]}")
            self._rouse()
            return until()

        if not listen(heard, condition, seconds, self.heard):
            raise Broken(f"waited {seconds:g} s for {what}: {[child.events[-2:] for child in heard]}")

    def watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Hear what is told for so long, or until the condition holds: whether it does."""
        return listen(self.everybody, until, seconds, self.heard)

    def heard(self, child: Child, event: Event) -> None:
        """Take in what a process has told."""
        match event["event"]:
            case "broke" | "refused":
                if child in (*self.trainers, *self.daemons) and child not in self.may_refuse:
                    raise Broken(f"a process broke: {event}")
            case "restored":
                self.promises.restored(event, self.training.world)
            case "save":
                self.promises.saved(event, child.config["rank"] if child in self.trainers else None)
            case "at":
                self.tally.points[event["point"]] += 1
                if child not in self._armed:  # it was too late to let it off
                    child.go_on()
            case "passed":
                self.tally.passed.add(f"{child.config['kind']} {event['point']}")
            case _:
                pass

    # Ends

    def kill_rank(self, victim: Child, others_seconds: float) -> None:
        """One rank, and a little later the others, as a launcher does. What all of them had sealed is committed."""
        victim.kill()
        self.tally.kills += 1
        self._hear_out([victim])
        self.trainers.remove(victim)
        self.zombies.append(victim)
        self.go_on()
        if self.trainers:
            self.watch(others_seconds)
        self.kill_trainers()
        self.await_commits()

    def kill_trainers(self) -> None:
        for child in self.trainers:
            child.kill()
            self.tally.kills += 1
        self._hear_out(self.trainers)
        for child in (*self.trainers, *self.zombies):
            child.close()
        self.may_refuse.clear()
        self.trainers.clear()
        self.zombies.clear()
        if self._only_trainers_hold:
            self.forget_memory()

    def kill_zombies(self) -> None:
        for child in self.zombies:
            self.tally.kills += child.alive
            child.kill()
        self._hear_out(self.zombies)
        for child in self.zombies:
            child.close()
        self.zombies.clear()

    def _hear_out(self, killed: Sequence[Child]) -> None:
        """What they had told up to their end."""
        if not listen(killed, lambda: all(child.heard_all for child in killed), DEADLINE_SECONDS, self.heard):
            raise Broken("somebody keeps the pipe of a dead process")

    def kill_daemon(self) -> None:
        for child in self.daemons:
            if child.alive:
                child.kill()
                self.tally.kills += 1
            child.close()
        self.daemons.clear()
        for daemon in self._daemons_of_trainers():
            daemon.kill()
            wait_until(lambda: not _lives(daemon), "a daemon to end", deadline_seconds=60)  # noqa: B023
            self.tally.kills += 1
        self._memory_bytes.clear()
        self._only_trainers_hold = True

    def kill_both(self, *, daemon_first: bool) -> None:
        """Daemon and all trainers, and so all memory."""
        self.zombies += self.trainers  # whoever is not killed first may be refused: that is no news
        self.trainers.clear()
        works: Sequence[Callable[[], None]] = (self.kill_zombies, self.kill_daemon)
        for work in reversed(works) if daemon_first else works:
            work()
        self.forget_memory()

    def forget_memory(self) -> None:
        """Whoever held it is gone."""
        self._only_trainers_hold = False
        self.promises.forget_memory(self.stored.committed())

    def go_on(self) -> None:
        """Nobody stands still any longer, now or later."""
        for child in self._armed & set(self.everybody):
            child.counter.stop_at(0)
        self._armed.clear()
        for child in self.everybody:
            child.go_on()

    def _rouse(self) -> None:
        """Who was stopped from outside just before it would have stopped by itself does so when it goes on."""
        for child in set(self.everybody) - self._armed:
            if not child.stopped and child.alive and child.stands_still():
                child.signal(signal.SIGCONT)

    def _daemons_of_trainers(self) -> list[psutil.Process]:
        return daemons_at(self._socket) if self.training.start_daemon else []

    # What has to hold

    def must_go_on(self) -> None:
        """Something that is sealed from now on is committed."""
        generation = self.promises.generation
        there = {version.step for version in self.stored.committed() if version.generation == generation}
        newest = max(self.promises.newest_sealed_step(), *there, 0)  # what a dead daemon did may not be told yet

        def went_on() -> bool:
            return any(v.generation == generation and v.step > newest for v in self.promises.committed)

        self.go_on()
        self.listen(went_on, f"a commit beyond step {newest} of generation {generation}")
        self._only_trainers_hold = False

    def await_commits(self) -> None:
        """Sealed by every rank, and the daemon lives: it is committed, though the trainers are dead."""
        version = self.promises.newest
        if version is None or not self.daemon_alive():
            return

        def there() -> bool:
            """Or a newer one, for which retention has taken it."""
            self._rouse()
            found = self.stored.committed()
            newer = any(in_order(other) > in_order(version) for other in found)
            return version in found or (newer and self.training.keep != KEPT_ALL)

        if not listen(self.daemons, there, DEADLINE_SECONDS, self.heard):
            raise Broken(f"{version} was sealed by all ranks, and is not committed")

    def check(self) -> None:
        """Look into storage, and at the daemon."""
        self.promises.seen(self.stored.check(), all_kept=self.training.keep == KEPT_ALL)
        self.tally.checkpoints = len(self.stored.checked)
        for child in self.daemons:
            if child.alive:
                self._check_daemon(child.pid)

    def _check_daemon(self, pid: int) -> None:
        """It holds no more than it needs, whatever has happened to its trainers."""
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            process = psutil.Process(pid)
            descriptors, threads = process.num_fds(), process.num_threads()
            if descriptors > DAEMON_DESCRIPTORS_MAX or threads > DAEMON_THREADS_MAX:
                held = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
                raise Broken(f"the daemon has {descriptors} descriptors and {threads} threads: {held}")
            own = next(
                int(line.split()[1]) << 10
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if line.startswith("RssAnon")
            )
            first = self._memory_bytes.setdefault(pid, own)
            if own > first + DAEMON_GROWTH_BYTES_MAX:
                raise Broken(f"the daemon grew from {first} to {own} bytes")

    def end(self) -> None:
        """A last life that comes to its end, after which nothing is left lying about."""
        self.kill_trainers()
        self.await_commits()
        self.start_trainers(steps=3)
        self.listen(lambda: self.all_said("end"), "the end")
        wait_until(lambda: not any(child.alive for child in self.trainers), "trainers to end", deadline_seconds=60)
        self.watch(0)
        self.check()
        ends = [child.last("end") for child in self.trainers]
        self.promises.check_end([None if end is None else end["step"] for end in ends])
        wait_until(lambda: not self.stored.left_over(), f"{self.stored.left_over()} to go", deadline_seconds=30)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
