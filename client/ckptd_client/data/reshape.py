"""Loaders whose state belongs to one rank: who can take over the states of another number of ranks, and who cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from ckptd.errors import MismatchError, UsageError
from ckptd_client.capture.objects import Reshapes

__all__ = ["PerRank", "Reshapes"]

OnResize = Literal["error", "restart"] | Callable[[Sequence[Any], int, int], Any]

_log = logging.getLogger(__name__)


class PerRank:
    """A loader of any make, whose state is valid for one rank of one world only.

    The state is saved with its rank and world. In the same world each rank gets its own back. In another one,
    ``on_resize`` says what happens: ``"error"``; ``"restart"``, which leaves the loader where it was constructed, and
    is logged; or a function of ``(states of the old ranks, rank, world)`` that gives the state for this rank.
    """

    def __init__(self, loader: Any, *, rank: int = 0, world: int = 1, on_resize: OnResize = "error") -> None:
        """``loader`` has ``state_dict()`` and ``load_state_dict(state)``. Raises :class:`UsageError` otherwise."""
        if not all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
            raise UsageError(f"{type(loader).__qualname__} has no state_dict() and load_state_dict()")
        if not 0 <= rank < world or not (callable(on_resize) or on_resize in ("error", "restart")):
            raise UsageError(f"rank {rank} of {world}, on_resize={on_resize!r}")
        self.loader = loader
        self.changes: list[str] = []
        """What restores found to be other than when the state was saved: a line for each such restore."""
        self._rank, self._world = rank, world
        self._on_resize: OnResize = on_resize

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, and whose it is."""
        return {"rank": self._rank, "world": self._world, "state": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the loader its state. Raises :class:`MismatchError` for that of another rank or world, unless the loader
        is to start anew then."""
        saved: dict[str, Any] = state if isinstance(cast(object, state), dict) else {}
        rank, world, old_world = saved.get("rank"), saved.get("world"), saved.get("from")
        if not isinstance(world, int):
            raise self._misfit("no state that it saved")
        if (rank, world) == (self._rank, self._world):
            self.loader.load_state_dict(saved["state"])
            if old_world is not None:
                self._note(f"world {old_world} → {world}, {self._name} goes on with a state made for rank {rank}")
        elif world != self._world and self._on_resize == "restart":
            self._note(f"world {world} → {self._world}, {self._name} starts anew on rank {self._rank}")
        else:  # what all ranks saved alike may be all that is left, and the rank is not
            raise self._misfit(
                f"the state of rank {rank} of {world}" if isinstance(rank, int) else f"one of {world} ranks"
            )

    def reshape_state(self, states: Sequence[Any], *, rank: int, world: int) -> dict[str, Any]:
        """See :class:`Reshapes`."""
        saved = cast("list[dict[str, Any]]", list(states))
        if len(saved) == world:
            return saved[rank]
        if self._on_resize == "restart":
            return {"world": len(saved)}
        if callable(self._on_resize):
            inner = self._on_resize([state["state"] for state in saved], rank, world)
            return {"rank": rank, "world": world, "state": inner, "from": len(saved)}
        raise self._misfit(f"states of {len(saved)} ranks")

    @property
    def _name(self) -> str:
        return type(self.loader).__qualname__

    def _misfit(self, found: str) -> MismatchError:
        return MismatchError(
            f"{self._name} is on rank {self._rank} of {self._world} now, and the checkpoint has {found}",
            hint="restore on as many ranks as saved, or give PerRank on_resize='restart' or a function",
        )

    def _note(self, change: str) -> None:
        _log.warning("data: %s", change)
        self.changes.append(change)
