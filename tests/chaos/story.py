"""One seed: a run that is killed and stopped at random again and again, and what has to hold after each time."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from devtools.seaweedfs import S3Endpoint
from tests.chaos.cast import KEPT_ALL, Cast, Tally, Training
from tests.chaos.children import Child, Nursery

POINT_SECONDS = 1.0
"""After so long without the chosen point, it happens where the processes are."""
ACTIONS = ("kill trainer", "kill daemon", "kill both", "stop trainer", "stop daemon", "take over")
WEIGHTS = (8, 7, 5, 2, 2, 2)
SHAPES = ((3, 2_000), (3, 5_000), (4, 40_000), (40, 5_000), (2, 400_000))
"""Tensors, and elements of each."""
S3_SHAPE = (3, 700_000)
"""Uploads of several parts."""
PACES = (("", 0.03), ("", 0.1), ("sealed", 0.05), ("durable", 0.05), ("committed", 0.03))


class Story:
    """Everything is chosen by the seed, but for what the machine's load decides."""

    def __init__(self, seed: int, nursery: Nursery, folder: Path, server: S3Endpoint | None = None) -> None:
        """``folder``: short, as a socket goes there; made here."""
        self._random = choose = random.Random(seed)
        tensors, elements = S3_SHAPE if server else choose.choice(SHAPES)
        wait, pause_seconds = choose.choice(PACES)
        training = Training(
            world=1 if server else choose.choice((1, 1, 1, 2, 3)),
            keep=choose.choice((KEPT_ALL, KEPT_ALL, 3)),
            tensors=tensors,
            elements=elements,
            wait=wait,
            pause_seconds=pause_seconds,
            slots=choose.choice((1, 2, 2, 3)),
            start_daemon=choose.random() < 0.3,
        )
        self._cast = Cast(nursery, folder, training, server)
        self._seed = seed

    @property
    def tally(self) -> Tally:
        """So far."""
        return self._cast.tally

    def tell(self, kills: int) -> None:
        """Until so many were killed, and then an end in peace. Raises :class:`tests.chaos.stored.Broken`."""
        try:
            with self._cast as cast:
                while cast.tally.kills < kills:
                    self._run_on()
                    self._attack()
                    cast.check()
                self._begin_daemon()
                cast.end()
        except Exception as error:
            error.add_note(f"seed {self._seed}: {self._cast.training}")
            raise

    def _run_on(self) -> None:
        """See to it that all ranks are training, and that they have what was promised."""
        cast = self._cast
        if cast.trainers:
            return
        self._begin_daemon()
        choose = self._random
        armed = {choose.randrange(cast.training.world): choose.randint(1, 120)} if choose.random() < 0.3 else {}
        cast.start_trainers(stop_at=dict[int, int | str](armed))

    def _begin_daemon(self, likely: float = 0.6) -> None:
        """One that is forked, or the trainers start theirs."""
        cast = self._cast
        if not cast.daemon_alive() and (not cast.training.start_daemon or self._random.random() < likely):
            cast.start_daemon()

    # What befalls them

    def _attack(self) -> None:
        cast = self._cast
        if not cast.one_stopped():
            self._go_to_the_moment()
        action = self._random.choices(ACTIONS, WEIGHTS)[0]
        if not cast.all_said("restored") and action not in ("kill trainer", "kill both"):
            action = "kill trainer"
        cast.watch(0)
        match action:
            case "kill trainer":
                stopped = [child for child in cast.trainers if child.stopped]
                victim = self._random.choice(stopped or cast.trainers)
                cast.kill_rank(victim, self._random.uniform(0, 0.4))
            case "kill daemon":
                cast.kill_daemon()
                self._begin_daemon()
                cast.must_go_on()
            case "kill both":
                cast.kill_both(daemon_first=self._random.random() < 0.5)
            case "stop trainer" | "stop daemon":
                self._stop(cast.trainers if action == "stop trainer" else cast.daemons)
            case _:
                self._take_over()

    def _go_to_the_moment(self) -> None:
        """A step of the protocol, or any instant."""
        cast = self._cast
        if self._random.random() < 0.7:
            armed = self._random.choice([child for child in (*cast.trainers, *cast.daemons) if child.alive])
            cast.arm(armed, self._random.randint(1, 60))
            cast.watch(POINT_SECONDS, cast.one_stopped)
        else:
            cast.watch(self._random.uniform(0, 0.6), cast.one_stopped)

    def _stop(self, children: list[Child]) -> None:
        """Stand still for a while, and go on."""
        self._cast.tally.stops += 1
        for child in children[:1]:
            child.signal(signal.SIGSTOP)
        self._cast.watch(self._random.uniform(0.1, 0.6))
        self._cast.must_go_on()

    def _take_over(self) -> None:
        """The trainers stand still, others take the run, and then the first ones go on, and may do no harm."""
        cast = self._cast
        cast.tally.stops += len(cast.trainers)
        for child in cast.daemons:
            child.go_on()
        for child in cast.trainers:
            child.signal(signal.SIGSTOP)
        cast.watch(0)
        cast.zombies += cast.trainers
        cast.trainers = []
        cast.start_trainers(takeover=True)
        for child in cast.zombies:
            child.go_on()
        if cast.all_said("restored"):
            cast.must_go_on()
        cast.kill_zombies()
