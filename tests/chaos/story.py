"""One seed: a run that is killed and stopped again and again, and what has to hold after each time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ckptd.format.keys import Version
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.chaos.children import Child, Event, Nursery, daemons_at, listen
from tests.chaos.stored import Broken, Stored

DEADLINE_SECONDS = 150.0
"""For whatever has to happen; a busy machine is slow."""
POINT_SECONDS = 3.0
"""After so long without the chosen point, it happens where the processes are."""
KEPT_ALL = 10_000
ACTIONS = ("kill trainer", "kill daemon", "kill both", "stop trainer", "stop daemon", "take over")
WEIGHTS = (8, 7, 5, 2, 2, 2)
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

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in ("stories", "kills", "stops", "restores", "checkpoints"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for point, count in other.points.items():
            self.points[point] += count


class Story:
    """Everything is chosen by the seed, but for what the machine's load decides."""

    def __init__(self, seed: int, nursery: Nursery, folder: Path, server: S3Endpoint | None = None) -> None:
        """``folder``: short, as a socket goes there; made here."""
        self.seed = seed
        self.random = random.Random(seed)
        self.tally = Tally(stories=1)
        folder.mkdir(mode=0o700)
        self._nursery = nursery
        self._folder = folder
        self._socket = folder / "s" / "d.sock"
        self._stored = Stored(server.prefix() if server else f"file://{folder / 'run'}", server)
        self._world = 1 if server else self.random.choice([1, 1, 1, 2, 3])
        self._keep = self.random.choice([KEPT_ALL, KEPT_ALL, 3])
        self._shape = (
            (3, 700_000) if server else self.random.choice([(3, 2_000), (4, 40_000), (40, 3_000), (2, 400_000)])
        )
        paces = [("", 0.05), ("", 0.2), ("sealed", 0.1), ("durable", 0.1), ("committed", 0.05)]
        self._pace = self.random.choice(paces)
        self._trainers: list[Child] = []
        self._zombies: list[Child] = []
        self._daemons: list[Child] = []
        self._pids: set[int] = set()
        self._sealed: dict[Version, set[int]] = defaultdict(set)
        self._worlds: dict[int, int] = {}
        self._promised: set[Version] = set()
        """Sealed by all ranks and in memory that lives, or committed."""
        self._committed: set[Version] = set()
        self._memory_bytes: dict[int, int] = {}

    def tell(self, kills: int) -> None:
        """Until so many were killed, and then an end in peace. Raises :class:`Broken`."""
        try:
            while self.tally.kills < kills:
                self._run_on()
                self._attack()
                self._check()
            self._end()
        except Exception as error:
            error.add_note(f"seed {self.seed}; processes wrote to {self._folder}/log")
            raise
        finally:
            for child in (*self._trainers, *self._zombies, *self._daemons):
                child.close()
            for daemon in daemons_at(self._socket):
                daemon.kill()
                with contextlib.suppress(psutil.Error):
                    daemon.wait(10)

    # The processes

    def _run_on(self) -> None:
        """See to it that all ranks are training, and that they have what was promised."""
        if self._trainers:
            return
        if not self._daemon_alive() and self.random.random() < 0.8:
            self._start_daemon()
        self._start_trainers(takeover=False)

    def _start_daemon(self) -> None:
        config = {"kind": "daemon", "socket": str(self._socket), "log": f"{self._folder}/log", "settings": {}}
        (self._folder / "s").mkdir(mode=0o700, exist_ok=True)
        self._daemons.append(self._nursery.fork(config))

    def _start_trainers(self, *, takeover: bool, endless: bool = True) -> None:
        launch = uuid.uuid4().hex
        wait, pause = self._pace
        armed = self.random.randrange(self._world) if endless and not takeover and self.random.random() < 0.3 else -1
        for rank in range(self._world):
            config = {
                "kind": "trainer",
                "url": self._stored.url,
                "storage_options": self._stored.options,
                "socket": str(self._socket),
                "log": f"{self._folder}/log",
                "rank": rank,
                "world": self._world,
                "launch": launch,
                "takeover": takeover,
                "keep": self._keep,
                "max_wait": 0.5 if endless else 60.0,
                "wait": wait,
                "pause_seconds": pause,
                "tensors": self._shape[0],
                "elements": self._shape[1],
                "steps": 100_000 if endless else 3,
                "stop_at": self.random.randint(1, 120) if rank == armed else 0,
            }
            self._trainers.append(self._nursery.fork(config))
        self._listen(lambda: self._all_said("restored") or self._one_stopped(), "the restore")
        if self._one_stopped():
            return  # before it had restored: that is where it will be killed
        self.tally.restores += self._world

    def _all_said(self, event: str) -> bool:
        return all(child.last(event) is not None for child in self._trainers)

    def _one_stopped(self) -> bool:
        return any(child.stopped for child in (*self._trainers, *self._daemons))

    def _daemon_alive(self) -> bool:
        return any(child.alive for child in self._daemons) or bool(daemons_at(self._socket))

    def _listen(self, until: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
        heard = [*self._trainers, *self._zombies, *self._daemons]

        def condition() -> bool:
            for child in self._trainers:
                if child.heard_all and not child.events[-1:] == [child.last("end")] and not child.alive:
                    raise Broken(f"a trainer ended during {what}: {child.events[-3:]}")
            return until()

        if not listen(heard, condition, seconds, self._heard):
            raise Broken(f"waited {seconds:g} s for {what}: {[child.events[-2:] for child in heard]}")

    def _heard(self, child: Child, event: Event) -> None:
        match event["event"]:
            case "broke" | "refused":
                if child in self._trainers or child in self._daemons:
                    raise Broken(f"a process broke: {event}")
            case "restored":
                self._worlds[event["generation"]] = self._world
                self._judge_restored(event)
            case "save":
                version = Version(event["step"], event["generation"])
                if child in self._trainers and event["state"] in ("sealed", "durable", "committed"):
                    self._sealed[version].add(child.config["rank"])
                    if len(self._sealed[version]) == self._world:
                        self._promised.add(version)
                if event["state"] == "committed":
                    self._committed.add(version)
            case "at":
                self.tally.points[event["point"]] += 1
            case _:
                pass
        if "daemon" in event:
            self._pids.add(event["daemon"])

    def _judge_restored(self, event: Event) -> None:
        got = (event["of"], event["step"])
        if event["found"] != [float(event["step"])]:
            raise Broken(f"a restore of step {event['step']} gave the numbers {event['found']}")
        wanted = max(((version.generation, version.step) for version in self._promised), default=(0, 0))
        if got < wanted:
            raise Broken(f"restored generation and step {got}, where {wanted} was promised: {event['decision']}")

    # What befalls them

    def _attack(self) -> None:
        if not self._one_stopped():
            self._go_to_the_moment()
        action = self.random.choices(ACTIONS, WEIGHTS)[0]
        unrestored = not self._all_said("restored")
        if unrestored and action not in ("kill trainer", "kill both"):
            action = "kill trainer"
        self._drain()
        match action:
            case "kill trainer":
                self._kill_one_trainer()
            case "kill daemon":
                self._kill_daemon()
                self._continue()
                self._must_go_on()
            case "kill both":
                self._kill_both()
            case "stop trainer" | "stop daemon":
                self._stop(action)
                self._must_go_on()
            case _:
                self._take_over()

    def _go_to_the_moment(self) -> None:
        """A step of the protocol, or any instant."""
        armed: list[Child] = []
        if self.random.random() < 0.7:
            candidates = [child for child in (*self._trainers, *self._daemons) if child.alive]
            armed = [self.random.choice(candidates)]
            armed[0].counter.stop_at(armed[0].counter.passed + self.random.randint(1, 60))
        seconds = POINT_SECONDS if armed else self.random.uniform(0, 0.6)
        listen([*self._trainers, *self._zombies, *self._daemons], self._one_stopped, seconds, self._heard)
        for child in armed:
            child.counter.stop_at(0)

    def _drain(self) -> None:
        """Hear what was told up to now."""
        listen([*self._trainers, *self._daemons], lambda: False, 0.01, self._heard)

    def _kill_one_trainer(self) -> None:
        """One rank, and a little later the others, as a launcher does."""
        stopped = [child for child in self._trainers if child.stopped]
        victim = self.random.choice(stopped or self._trainers)
        victim.kill()
        self.tally.kills += 1
        self._drain()
        self._trainers.remove(victim)
        self._zombies.append(victim)
        self._continue()
        if self._trainers:
            listen(self._trainers, lambda: False, self.random.uniform(0, 0.4), self._heard)
        self._kill_trainers()
        self._await_commits()

    def _kill_both(self) -> None:
        self._zombies += self._trainers  # whoever is not killed first may be refused: that is no news
        self._trainers.clear()
        for work in self.random.sample([self._kill_daemon, self._kill_zombies], 2):
            work()
        self._forget_memory()

    def _kill_zombies(self) -> None:
        for child in self._zombies:
            self.tally.kills += child.alive
            child.kill()
        listen(self._zombies, lambda: all(child.heard_all for child in self._zombies), 5, self._heard)
        for child in self._zombies:
            child.close()
        self._zombies.clear()

    def _kill_trainers(self) -> None:
        for child in self._trainers:
            child.kill()
            self.tally.kills += 1
        self._drain()
        for child in (*self._trainers, *self._zombies):
            child.close()
        self._trainers.clear()
        self._zombies.clear()

    def _kill_daemon(self) -> None:
        for child in self._daemons:
            if child.alive:
                child.kill()
                self.tally.kills += 1
            child.close()
        self._daemons.clear()
        for daemon in daemons_at(self._socket):
            daemon.kill()
            wait_until(lambda: not _lives(daemon), "a daemon to end", deadline_seconds=60)  # noqa: B023
            self.tally.kills += 1
        self._memory_bytes.clear()
        if self._trainers and self.random.random() < 0.6:
            self._start_daemon()

    def _stop(self, action: str) -> None:
        """Stand still for a while, and go on."""
        self.tally.stops += 1
        children = self._trainers if action == "stop trainer" else self._daemons
        for child in children[:1]:
            child.signal(signal.SIGSTOP)
        listen([*self._trainers, *self._daemons], lambda: False, self.random.uniform(0.1, 1.0), self._heard)
        self._continue()

    def _continue(self) -> None:
        for child in (*self._trainers, *self._daemons):
            child.signal(signal.SIGCONT)

    def _take_over(self) -> None:
        """The trainers stand still, others take the run, and then the first ones go on, and may do no harm."""
        self.tally.stops += len(self._trainers)
        for child in self._daemons:
            child.signal(signal.SIGCONT)
        for child in self._trainers:
            child.signal(signal.SIGSTOP)
        self._drain()
        self._zombies += self._trainers
        self._trainers = []
        self._start_trainers(takeover=True)
        for child in self._zombies:
            child.signal(signal.SIGCONT)
        if self._all_said("restored"):
            self._must_go_on()
        self._kill_zombies()

    # What has to hold

    def _must_go_on(self) -> None:
        """Something that is sealed from now on is committed."""
        generation = max(self._worlds)
        newest = max((version.step for version in self._sealed if version.generation == generation), default=0)
        children = [*self._trainers, *self._daemons]
        for child in children:
            child.counter.stop_at(0)

        def went_on() -> bool:
            for child in children:
                if child.stopped:  # at a point that was chosen for the attack before
                    child.signal(signal.SIGCONT)
            return any(v.generation == generation and v.step > newest for v in self._committed)

        self._listen(went_on, f"a commit beyond step {newest} of generation {generation}")

    def _forget_memory(self) -> None:
        """Both are gone, and all that they said is heard: only what is committed is promised."""
        self._committed |= self._stored.committed()
        self._promised = set(self._committed)

    def _await_commits(self) -> None:
        """Sealed by every rank, and the daemon lives: it is committed, though the trainers are dead."""
        newest = max(((v.generation, v.step) for v in self._promised), default=None)
        if newest is None or not self._daemon_alive():
            return
        version = Version(newest[1], newest[0])
        if not listen(self._daemons, lambda: version in self._stored.committed(), DEADLINE_SECONDS, self._heard):
            raise Broken(f"{version} was sealed by all ranks, and is not committed")

    def _check(self) -> None:
        present = self._stored.check()
        if self._keep == KEPT_ALL and (gone := self._committed - present):
            raise Broken(f"{sorted(map(str, gone))} were committed, and are gone")
        self._committed |= present
        self._promised |= present
        self.tally.checkpoints = len(self._stored.checked)
        for child in self._daemons:
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

    def _end(self) -> None:
        """A last life that comes to its end, after which nothing is left lying about."""
        self._kill_trainers()
        self._await_commits()
        self._start_trainers(takeover=False, endless=False)
        self._listen(lambda: self._all_said("end"), "the end")
        wait_until(lambda: not any(child.alive for child in self._trainers), "trainers to end", deadline_seconds=60)
        self._drain()
        self._check()
        last = max(self._committed, key=lambda version: (version.generation, version.step))
        ends = [child.last("end") for child in self._trainers]
        if any(end is None or end["step"] != last.step for end in ends):
            raise Broken(f"the last checkpoint is {last}, and the training ended with {ends}")
        wait_until(lambda: not self._stored.left_over(), f"{self._stored.left_over()} to go", deadline_seconds=30)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
