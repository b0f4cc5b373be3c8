"""One pass over the live state: the state tree, and the tensors in the order in which it names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckptd.format.names import join
from ckptd.format.tree import Path, encode_tree
from ckptd_client.capture import codecs

if TYPE_CHECKING:
    from ckptd_client.capture.flat import FlatSlice
    from ckptd_client.capture.restore import Restoring


class Source(ABC):
    """Something in the state that has a way of its own to be captured and restored."""

    @abstractmethod
    def walk(self, walk: Walk) -> Any:
        """Give the tensors to ``walk`` and return the tree of what the object holds. Changes nothing."""

    @abstractmethod
    def prepare(self, saved: object, restoring: Restoring) -> None:
        """Check what was saved against what is live and plan how it gets there. Changes nothing."""


ParameterNames = Mapping[int, tuple[Path, str]]
"""By ``id`` of a parameter: where its module is in the state, and its canonical name in the module."""
FlatParameters = Mapping[int, tuple[Path, tuple[tuple[str, "FlatSlice"], ...]]]
"""By ``id`` of a parameter that holds ranges of several: where these are in the state, their names and places."""
FindSource = Callable[[object, Path], Source | None]
"""The source for a value at a path; ``None`` for a value that is no object with state of its own."""


class Walk:
    """What a pass has found so far."""

    def __init__(
        self, parameter_names: ParameterNames, owned: set[int], flat_parameters: FlatParameters | None = None
    ) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.fenced: list[bool] = []
        self.parameter_names = parameter_names
        """The same object as long as no parameter moved."""
        self.flat_parameters: FlatParameters = {} if flat_parameters is None else flat_parameters
        """The same object as long as no parameter moved."""
        self.owned = owned
        """The ``id`` of each parameter that an optimizer of the state owns."""

    def tensor(self, name: str, tensor: torch.Tensor, *, fenced: bool = False) -> dict[str, Any]:
        """Take one tensor and return the reference to it."""
        self.extend([name], [tensor], [fenced or id(tensor) in self.owned])
        return {"$": "tensor", "v": name}

    def extend(self, names: list[str], tensors: list[torch.Tensor], fenced: list[bool]) -> None:
        """Take many tensors whose references the caller keeps."""
        self.names += names
        self.tensors += tensors
        self.fenced += fenced

    def value(self, value: object, path: Path) -> Any:
        """The tree of any value. Raises :class:`StateError`, naming the path, for one that cannot be saved."""
        return encode_tree(value, self._leaf, path)

    def _leaf(self, value: object, path: Path) -> dict[str, Any] | None:
        if isinstance(value, torch.Tensor):
            return self.tensor(join(path), value)
        return codecs.encode(value, path, self)
