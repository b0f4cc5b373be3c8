"""What all loaders of ckptd have in common: one iterator at a time, a position of what was given, steps of several
batches, and a record of what a restore changed."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from ckptd.errors import MismatchError, UsageError

Position = TypeVar("Position")

_log = logging.getLogger(__name__)


class Resumable(ABC, Generic[Position]):
    """Iterates over batches and counts what it gives. ``Position`` is a value: a new one for each batch."""

    def __init__(self, start: Position, accumulation: int) -> None:
        if accumulation < 1:
            raise UsageError(f"accumulation={accumulation}: an optimizer step takes at least one batch")
        self.changes: list[str] = []
        """What restores found to be other than when the state was saved: a line for each such restore."""
        self._accumulation = accumulation
        self._given_to = start
        self._settled = start
        self._since = 0  # batches since the boundary
        self._current: weakref.ref[_Iteration[Position]] | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether the batches given so far make whole optimizer steps: ``accumulation`` batches each, fewer for the
        last one before an iterator ends."""
        return self._since == 0

    def __iter__(self) -> Iterator[Any]:
        """Go on from the position. An iterator made earlier gives nothing more: its next batch is an error."""
        iteration = _Iteration(self, self._batches(self._given_to))
        self._current = weakref.ref(iteration)
        return iteration

    @abstractmethod
    def _batches(self, start: Position) -> Iterator[tuple[Any, Position]]:
        """Batches up to the end of the iteration, each with the position after it."""

    @abstractmethod
    def _next(self, end: Position) -> Position:
        """Where the next iteration begins after one that came to its end."""

    def _must_be_idle(self) -> None:
        if self._current is not None and (iteration := self._current()) is not None and not iteration.over:
            raise UsageError(
                "the loader is being iterated and cannot take a state", hint="restore before the loop, not within it"
            )

    def _go(self, position: Position) -> None:
        self._given_to = self._settled = position
        self._since = 0

    def _note(self, changes: list[str], position: str) -> None:
        """Log where a restore goes on and what is not as it was saved."""
        line = ", ".join([*changes, position])
        _log.info("data: %s", line)
        if changes:
            self.changes.append(line)

    def _give(self, position: Position, *, last: bool) -> None:
        """A batch goes to the trainer."""
        self._given_to = position
        self._since += 1
        if last or self._since >= self._accumulation:
            self._go(position)


class _Iteration(Iterator[Any], Generic[Position]):
    """One iteration. With accumulation it is a batch ahead, to know which one is the last."""

    def __init__(self, loader: Resumable[Position], batches: Iterator[tuple[Any, Position]]) -> None:
        self._loader = loader
        self._batches = batches
        self._ahead: tuple[Any, Position] | None = None
        self.over = False

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        loader = self._loader
        if loader._current is None or loader._current() is not self:
            raise UsageError("a newer iterator over this loader has taken over", hint="keep one iterator at a time")
        given = self._ahead or next(self._batches, None)
        self._ahead = None
        if given is None:
            self.over = True
            loader._go(loader._next(loader._given_to))
            raise StopIteration
        if loader._accumulation > 1:
            self._ahead = next(self._batches, None)
        batch, position = given
        loader._give(position, last=loader._accumulation > 1 and self._ahead is None)
        return batch


def check_field(state: Mapping[str, Any], field: str, live: object, hint: str = "") -> None:
    """Raises :class:`MismatchError` unless the state has the live value."""
    if state.get(field) != live:
        raise MismatchError(f"the loader's state has {field}={state.get(field)!r}, and here it is {live!r}", hint=hint)


def as_state(state: object) -> dict[str, Any]:
    """Raises :class:`MismatchError` for what no loader has saved, such as the states of several ranks that differ."""
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in cast("dict[object, object]", state)):
        raise MismatchError(f"the loader's state is no dict, but {state!r:.80}")
    return cast("dict[str, Any]", state)


def changed(state: Mapping[str, Any], live: Mapping[str, tuple[str, object]]) -> list[str]:
    """``name old → new`` for what differs. ``live``: field → its name in a sentence, and its value."""
    return [
        f"{name} {state[field]} → {value}"
        for field, (name, value) in live.items()
        if field in state and state[field] != value
    ]
