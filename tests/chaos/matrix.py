"""Every step of the protocol, for everybody whom it may befall, killed and stopped.

At a step, whoever takes it stands still; then the victims are killed, or stand still a little longer and go on, and
whoever is left goes on as well.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.chaos.cast import Cast, Tally, Training
from tests.chaos.children import Child, Nursery
from tests.chaos.steps import STEPS, Step

Victims = Literal["trainer", "daemon", "both"]
Fate = Literal["kill", "stop"]

STANDING_SECONDS = 0.1
OTHERS_SECONDS = 0.05
"""After the death of one rank, before a launcher ends the others."""
QUICK = {"retention_grace_seconds": 0.02, "verify_delay_seconds": 0.05, "commit_seconds": 60.0}


@dataclass(frozen=True)
class Cell:
    """One of the matrix. ``trainer``: the only one, or one rank of several."""

    step: Step
    victims: Victims
    fate: Fate

    def __str__(self) -> str:
        return f"{self.fate} {self.victims} while the {self.step.who} stands {self.step.point}"


VICTIMS: tuple[Victims, ...] = ("trainer", "daemon", "both")


def all_cells(seed: int) -> list[Cell]:
    """In an order that the seed chooses."""
    cells = [Cell(step, victims, fate) for step in STEPS for victims in VICTIMS for fate in ("kill", "stop")]
    random.Random(seed).shuffle(cells)
    return cells


def some_cells(seed: int) -> list[Cell]:
    """Each step once with a kill and once with a stop, each time for others; in an order that the seed chooses."""
    turns = [(step, VICTIMS[number % 3], VICTIMS[(number + 1) % 3]) for number, step in enumerate(STEPS, seed)]
    cells = [Cell(step, killed, "kill") for step, killed, _ in turns]
    cells += [Cell(step, stopped, "stop") for step, _, stopped in turns]
    random.Random(seed).shuffle(cells)
    return cells


def cells_of_a_rank(seed: int, every: int = 1) -> list[Cell]:
    """One rank of several, killed at each ``every``-th step and stopped at half as many; in an order that the seed
    chooses."""
    cells = [Cell(step, "trainer", "kill") for step in STEPS[seed % every :: every]]
    cells += [Cell(step, "trainer", "stop") for step in STEPS[seed % (2 * every) :: 2 * every]]
    random.Random(seed).shuffle(cells)
    return cells


class Matrix:
    """A run that goes through cells, one after the other."""

    def __init__(self, seed: int, nursery: Nursery, folder: Path, *, world: int) -> None:
        """``folder``: short, as a socket goes there; made here."""
        self._random = random.Random(seed)
        training = Training(world=world, keep=2, pause_seconds=0.03)
        self._cast = Cast(nursery, folder, training, settings=QUICK)

    @property
    def tally(self) -> Tally:
        """So far."""
        return self._cast.tally

    def tell(self, cells: Sequence[Cell]) -> None:
        """All of them, and then an end in peace. Raises :class:`tests.chaos.stored.Broken`, and says at which cell."""
        with self._cast as cast:
            cast.start_daemon()
            for cell in cells:
                try:
                    self._meet(cell)
                    cast.check()
                except Exception as error:
                    error.add_note(str(cell))
                    raise
            cast.go_on()
            cast.end()

    def _meet(self, cell: Cell) -> None:
        self._go_to(cell.step)
        if cell.fate == "stop":
            self._stop(cell)
        elif cell.victims == "both":
            self._cast.kill_both(daemon_first=self._random.random() < 0.5)
        elif cell.victims == "trainer":
            self._cast.kill_rank(self._victim(), OTHERS_SECONDS)
        else:
            self._kill_daemon()
        if not self._cast.daemons:
            self._cast.start_daemon()

    def _victim(self) -> Child:
        """Who stands still, or any rank while the daemon does."""
        stopped = [child for child in self._cast.trainers if child.stopped]
        return self._random.choice(stopped or self._cast.trainers)

    def _go_to(self, step: Step) -> None:
        cast = self._cast
        if not cast.trainers:
            cast.start_trainers()
        if step.begins:
            cast.must_go_on()  # there is something that they leave
        if step.begins == "trainer":
            cast.kill_trainers()
            cast.await_commits()
        elif step.begins == "both":
            cast.kill_both(daemon_first=self._random.random() < 0.5)
            cast.start_daemon()
        rank = 0 if step.of_rank_0 else self._random.randrange(cast.training.world)
        at_start: dict[int, int | str] = {}
        if step.who == "daemon" and step.begins != "daemon":
            cast.arm(cast.daemons[0], step.point)
        elif step.who == "trainer" and cast.trainers:
            cast.arm(cast.trainers[rank], step.point)
        elif step.who == "trainer":
            at_start = {rank: step.point}
        if step.begins in ("trainer", "both"):
            cast.start_trainers(stop_at=at_start)
        elif step.begins == "daemon":
            cast.kill_daemon()
            cast.start_daemon(step.point if step.who == "daemon" else 0)
        cast.listen(cast.one_stopped, f"the {step.who} to come {step.point}")

    def _kill_daemon(self) -> None:
        """Trainers that were not let in yet may give up; others go on."""
        cast = self._cast
        starting = not cast.all_said("restored")
        if starting:
            cast.may_refuse |= set(cast.trainers)
        cast.kill_daemon()
        cast.start_daemon()
        cast.go_on()
        if not starting:
            cast.must_go_on()
            return
        cast.listen(
            lambda: cast.all_said("restored") or any(child.heard_all for child in cast.trainers),
            "the trainers to begin or to give up",
        )
        cast.kill_trainers()

    def _stop(self, cell: Cell) -> None:
        cast = self._cast
        trainers = [self._victim()] if cell.victims != "daemon" else []
        daemons = cast.daemons if cell.victims != "trainer" else []
        standing = [*trainers, *daemons]
        self._random.shuffle(standing)
        cast.tally.stops += len(standing)
        for child in standing:
            if not child.stopped:
                child.signal(signal.SIGSTOP)
        for child in cast.everybody:
            if child not in standing:
                child.go_on()
        cast.watch(STANDING_SECONDS)
        for child in standing:
            child.go_on()
        cast.listen(lambda: cast.all_said("restored"), "the restore")
        cast.must_go_on()
