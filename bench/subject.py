"""What the harness wants of a subject."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bench.state import TrainingState


@dataclass(frozen=True, slots=True)
class Promises:
    """What a subject says of a checkpoint that it calls complete: a table without this would compare unlike things."""

    fsync: bool
    """The data is on the disk. Where it is not, the harness syncs the files, and the time to durable includes that."""
    digest: str
    """What protects each byte; empty: nothing."""
    commit: str
    """What tells a complete checkpoint from a part of one; empty: nothing."""
    software: str
    """Library and release."""


class Handle(ABC):
    """A save under way. Both waits raise what went wrong."""

    @abstractmethod
    def wait_copied(self) -> None:
        """On the training thread, before the optimizer's step: return when the state may change."""

    @abstractmethod
    def wait_durable(self) -> None:
        """On a thread of the harness: return when the subject calls the checkpoint complete."""


class Done(Handle):
    """Of a save that was over when the call returned."""

    def wait_copied(self) -> None:
        pass

    def wait_durable(self) -> None:
        pass


class Subject(ABC):
    """One way of saving and restoring a training state. Used from the training thread.

    To add one: a module in ``bench/subjects`` with such a class, and a line in the table there. The module is imported
    in the turn's own process only.
    """

    promises: ClassVar[Promises]

    def __init__(self, state: TrainingState, folder: Path) -> None:
        """``folder`` is empty, and the subject's own."""
        self.state = state
        self.folder = folder

    def open(self) -> None:  # noqa: B027
        """Get ready: start processes, make buffers. Comes after the first optimizer steps, and is not timed."""

    @abstractmethod
    def save(self, step: int) -> Handle:
        """Save the live state. Whatever is not copied on return must not change before ``wait_copied``."""

    def stepped(self, step: int) -> None:  # noqa: B027
        """A training step, optimizer included, is over."""

    def restart(self, *, keep_memory: bool) -> None:  # noqa: B027
        """Not timed: as if the trainer had ended and begun anew, or, without ``keep_memory``, the machine."""

    @abstractmethod
    def restore(self, step: int) -> None:
        """Bring a checkpoint into the live state, from wherever it is to be had."""

    restores_from_memory: ClassVar[bool] = False
    """Whether a restore after ``restart(keep_memory=True)`` needs no storage."""

    def stored(self, step: int) -> Path:
        """The file or folder of one checkpoint."""
        return self.folder / f"{step:06d}"

    def discard(self, step: int) -> None:
        """Delete a checkpoint that is not needed any more; not timed."""
        path = self.stored(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:  # noqa: B027
        """End what was started."""


def files_of(path: Path) -> Iterator[Path]:
    """The path itself, or all files below it."""
    yield from (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else (path,)
