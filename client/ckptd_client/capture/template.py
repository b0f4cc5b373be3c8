"""The tree of a value, kept from walk to walk.

Of a state with very many tensors the structure is the same at nearly every save. So the tree is made once; after that
a walk only compares the structure, collects the tensors, and puts the new numbers where they belong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.errors import StateError
from ckptd.format.names import element, join, segment
from ckptd.format.tree import Path, encode_tree
from ckptd.limits import TREE_DEPTH_MAX

if TYPE_CHECKING:
    from ckptd_client.capture.walk import FindSource, Walk

_MAPPINGS = frozenset({dict, OrderedDict})
_CONTAINERS = _MAPPINGS | {list, tuple}
_PLAIN = frozenset({int, float, bool, str, type(None)})
_PLAIN_KEYS = frozenset({str, int, bool, bytes, type(None)})
"""Keys of these types are the same key where type and value are equal; of others only where they are spelled alike."""


class Template:
    """Walks values of one place in the state."""

    def __init__(self, path: Path, *, fenced: bool = False, find: FindSource | None = None) -> None:
        """``fenced``: all tensors of this place change in the optimizer's step only. ``find``: what finds the source
        of an object with a state of its own; without it, such an object is refused."""
        self._path = path
        self._fenced = fenced
        self._find = find
        self._shape: list[object] = []
        self._root: list[Any] = [None]  # the tree, as the only element
        self._runs: list[_Run] = []
        self._plain: list[_Slot] = []

    def walk(self, walk: Walk, value: object) -> Any:
        """The tree of the value; its tensors go to ``walk``. The tree is valid until the next call."""
        shape: list[object] = []
        values: list[object] = []
        _look((value,), shape, values, 0, self._path)
        if shape != self._shape:
            self._build(value)
            self._shape = shape
        for run in self._runs:
            tensors = cast("list[torch.Tensor]", [values[i] for i in run.at])
            if tensors:
                walk.extend(run.names, tensors, self._fences(tensors, walk.owned))
            if run.then is not None:
                self._fill(run.then, walk, values)
        for slot in self._plain:
            self._fill(slot, walk, values)
        return self._root[0]

    def _fill(self, slot: _Slot, walk: Walk, values: list[object]) -> None:
        value = values[slot.at]
        source = None if self._find is None else self._find(value, slot.path)
        slot.holder[slot.place] = walk.value(value, slot.path) if source is None else source.walk(walk)

    def _fences(self, tensors: list[torch.Tensor], owned: set[int]) -> list[bool]:
        return [True] * len(tensors) if self._fenced else [id(tensor) in owned for tensor in tensors]

    def _build(self, value: object) -> None:
        self._root = [encode_tree(_skeleton(value), _no_leaf, self._path)]
        self._runs, self._plain = [_Run([], [], None)], []
        for i, (holder, place, path, item) in enumerate(_slots(self._root, 0, self._path, value)):
            run = self._runs[-1]
            if isinstance(item, torch.Tensor):
                name = join(path)
                holder[place] = {"$": "tensor", "v": name}
                run.names.append(name)
                run.at.append(i)
            elif type(item) in _PLAIN:
                self._plain.append(_Slot(i, holder, place, path))
            else:  # may have tensors of its own, which come in their turn
                run.then = _Slot(i, holder, place, path)
                self._runs.append(_Run([], [], None))


@dataclass(slots=True)
class _Slot:
    """Where a value that is no tensor belongs in the tree."""

    at: int
    """Its index among the values."""
    holder: list[Any]
    place: int
    path: Path


@dataclass(slots=True)
class _Run:
    """Tensors that follow each other, and the object after them."""

    names: list[str]
    at: list[int]
    """The index of each among the values."""
    then: _Slot | None


def _look(items: Iterable[object], shape: list[object], values: list[object], depth: int, path: Path) -> None:
    """Collect what is no container, in order, and what the tree depends on beside it. Fast: runs at every save."""
    if depth > TREE_DEPTH_MAX:
        raise StateError(f"{join(path)}: nested deeper than {TREE_DEPTH_MAX} levels", hint="is it a cycle?")
    for item in items:
        kind = type(item)
        shape.append(kind)
        if kind not in _CONTAINERS:
            values.append(item)
        elif kind in _MAPPINGS:
            mapping = cast("dict[object, object]", item)
            kinds = list(map(type, mapping))
            shape.append(len(kinds))
            shape += mapping
            shape += kinds
            if not _PLAIN_KEYS.issuperset(kinds):
                shape += map(repr, mapping)
            _look(mapping.values(), shape, values, depth + 1, path)
        else:
            sequence = cast("list[object]", item)
            shape.append(len(sequence))
            _look(sequence, shape, values, depth + 1, path)


def _skeleton(value: object) -> object:
    """The containers of a value, with nothing in the place of all else."""
    kind = type(value)
    if kind in _MAPPINGS:
        mapping = cast("dict[Any, object]", value)
        return cast("type[dict[Any, object]]", kind)((key, _skeleton(item)) for key, item in mapping.items())
    if kind in _CONTAINERS:
        return cast("type[list[object]]", kind)(_skeleton(item) for item in cast("list[object]", value))
    return None


def _slots(holder: list[Any], place: int, path: Path, value: object) -> Iterator[tuple[list[Any], int, Path, object]]:
    """Where each value that is no container belongs in the tree of its skeleton, in the order of :func:`_look`."""
    kind, node = type(value), holder[place]
    if kind in _MAPPINGS:
        items = cast("dict[Any, object]", value).items()
        for pair, (key, item) in zip(node["v"], items, strict=True):
            yield from _slots(pair, 1, (*path, segment(key)), item)
    elif kind in _CONTAINERS:
        nodes = node if kind is list else node["v"]
        for i, item in enumerate(cast("list[object]", value)):
            yield from _slots(nodes, i, (*path, element(i)), item)
    else:
        yield holder, place, path, value


def _no_leaf(value: object, path: Path) -> dict[str, Any] | None:
    return None
