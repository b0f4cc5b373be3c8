"""Finding a value in a state tree without making the rest of it."""

from __future__ import annotations

from typing import Any, cast

from ckptd.errors import FormatError
from ckptd.format.names import element, join, segment
from ckptd.format.tree import Path, decode_tree

_MAPPINGS = {"dict", "odict", "counter"}


def node_at(tree: Any, name: str) -> Any | None:
    """The node that stands under a name such as ``loaders/~l0``; ``None`` where there is none. Raises
    :class:`FormatError` for a tree that is malformed on the way."""
    path: Path = ()
    node = tree
    while join(path) != name:
        for step, child in _children(node):
            inner = (*path, step)
            if name == join(inner) or name.startswith(join(inner) + "/"):
                path, node = inner, child
                break
        else:
            return None
    return node


def _children(node: Any) -> list[tuple[str, Any]]:
    try:
        if isinstance(node, list):
            return [(element(i), child) for i, child in enumerate(cast("list[object]", node))]
        if not isinstance(node, dict):
            return []
        members = cast("dict[str, Any]", node)
        if members.get("$") in _MAPPINGS:
            return [(segment(decode_tree(key, _no_leaf)), child) for key, child in members["v"]]
        if members.get("$") == "tuple":
            return [(element(i), child) for i, child in enumerate(members["v"])]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"state tree: malformed: {error!s:.200}") from None
    return []


def _no_leaf(tag: str, members: dict[str, Any]) -> object:
    raise ValueError(f"a key of type {tag[:40]!r}")
