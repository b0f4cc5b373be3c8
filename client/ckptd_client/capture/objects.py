"""Any object with ``state_dict()`` and ``load_state_dict()``: schedulers, loaders, averages, engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptd.errors import StateError, first_line
from ckptd.format.names import join
from ckptd.format.tree import Path
from ckptd_client.capture.template import Template
from ckptd_client.capture.walk import Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring


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
        restoring.load(join(self._path), saved, self._thing.state_dict, self._thing.load_state_dict)


def keeps_state(value: object) -> bool:
    """Whether the value is an object with state of its own."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )
