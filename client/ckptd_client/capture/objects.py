"""Any object with ``state_dict()`` and ``load_state_dict()``: schedulers, loaders, averages, engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ckptd.errors import CkptdError, StateError, first_line
from ckptd.format.names import join
from ckptd.format.tree import Path
from ckptd_client.capture.template import Template
from ckptd_client.capture.walk import Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring


@runtime_checkable
class Reshapes(Protocol):
    """An object whose state is each rank's own, and that can take over the states of another number of ranks."""

    def reshape_state(self, states: Sequence[Any], *, rank: int, world: int) -> Any:
        """What ``load_state_dict`` is to take on ``rank`` of ``world``. ``states``: what ``state_dict`` gave on each
        rank that saved, in order of rank; plain values only. Changes nothing, and gives the same for the same. Raises
        :class:`ckptd.errors.MismatchError` where it cannot be."""
        ...


class ObjectSource(Source):
    """An object that makes and takes its own state."""

    def __init__(self, thing: Any, path: Path) -> None:
        self._thing = thing
        self._path = path
        self._template = Template(path)

    def walk(self, walk: Walk) -> Any:
        try:
            state = self._thing.state_dict()
        except Exception as error:
            raise StateError(f"{join(self._path)}: state_dict() failed: {first_line(error)}") from error
        return self._template.walk(walk, state)

    def prepare(self, saved: object, restoring: Restoring) -> None:
        where = join(self._path)
        if not restoring.takes(where):
            return
        if restoring.contents.missing_here(saved) is not None:
            saved = self._reshaped(where, saved, restoring)
        restoring.load(where, saved, self._thing.state_dict, self._thing.load_state_dict)

    def _reshaped(self, where: str, saved: object, restoring: Restoring) -> object:
        """What the object makes of the states of another number of ranks; where it cannot, ``saved``, and a note."""
        ranks, thing = restoring.contents.ranks, self._thing
        if not isinstance(thing, Reshapes):
            return saved
        try:
            states = restoring.contents.of_each_rank(where)
            if states is None:
                return saved
            return thing.reshape_state(states, rank=ranks.rank, world=ranks.world)
        except CkptdError as error:
            restoring.mismatch(where, error.message)
        except Exception as error:
            restoring.mismatch(where, f"reshape_state() failed: {first_line(error)}")
        return saved


def keeps_state(value: object) -> bool:
    """Whether the value is an object with state of its own."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )
