"""What the state trees of all ranks have in common: one tree for whoever restores on another number of ranks.

Dicts are united by key, in the order in which keys first appear; lists and tuples of equal length are merged element by
element; equal nodes stay; all else becomes ``{"$":"per_rank"}``, also what is a dict on one rank and a list, or a dict
of another type, on another. The result does not depend on the order of the ranks but for the order of keys.

Trees are compared as bytes and opened only where they differ, so that a thousand large equal trees cost a thousand
comparisons, and trees that differ in one leaf are scanned but not decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ckptd.errors import FormatError
from ckptd.format.tree import PER_RANK
from ckptd.limits import TREE_DEPTH_MAX

_PER_RANK_NODE = msgspec.json.encode({"$": PER_RANK})
_MAPPINGS = {"dict", "odict", "counter"}


class _Tagged(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tag: str = msgspec.field(name="$")
    v: msgspec.Raw


_TAGGED = msgspec.json.Decoder(_Tagged)
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[tuple[msgspec.Raw, msgspec.Raw]])


def _opened(data: bytes) -> tuple[str, list[tuple[bytes, bytes]]] | None:
    """The type of a node that can be merged, and its children by key or number; ``None`` for any other."""
    try:
        if data[:1] == b"[":
            return "list", list(_numbered(_ELEMENTS.decode(data)))
        if data[:1] != b"{":
            return None
        node = _TAGGED.decode(data)
        if node.tag == "tuple":
            return node.tag, list(_numbered(_ELEMENTS.decode(node.v)))
        if node.tag not in _MAPPINGS:
            return None
        items = [(bytes(key), bytes(value)) for key, value in _ITEMS.decode(node.v)]
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None  # not a node of this type; whoever decodes the tree says so
    return (node.tag, items) if len({key for key, _ in items}) == len(items) else None


def _numbered(elements: list[msgspec.Raw]) -> Iterator[tuple[bytes, bytes]]:
    for number, element in enumerate(elements):
        yield b"%d" % number, bytes(element)


class _Node:
    """A node of the merged tree: bytes that all ranks so far share, or children, or what differs."""

    __slots__ = ("children", "data", "kind")

    def __init__(self, data: bytes) -> None:
        self.data: bytes | None = data
        """``None`` once it is opened."""
        self.kind = ""
        self.children: dict[bytes, _Node] = {}

    def merge(self, other: bytes, depth: int = 0) -> None:
        if self.data in (other, _PER_RANK_NODE):
            return
        theirs = _opened(other) if depth < TREE_DEPTH_MAX else None
        if theirs is not None and self.data is not None:
            self._open()
        if theirs is None or theirs[0] != self.kind or not self._fits(theirs[1]):
            self.data, self.children = _PER_RANK_NODE, {}
            return
        for key, data in theirs[1]:
            child = self.children.get(key)
            if child is None:
                self.children[key] = _Node(data)
            else:
                child.merge(data, depth + 1)

    def _open(self) -> None:
        assert self.data is not None
        mine = _opened(self.data)
        if mine is not None:
            self.kind, self.data = mine[0], None
            self.children = {key: _Node(data) for key, data in mine[1]}

    def _fits(self, theirs: list[tuple[bytes, bytes]]) -> bool:
        return self.kind in _MAPPINGS or len(theirs) == len(self.children)

    def encoded(self) -> bytes:
        if self.data is not None:
            return self.data
        if self.kind in _MAPPINGS:
            text = b",".join([b"[%b,%b]" % (key, child.encoded()) for key, child in self.children.items()])
        else:
            text = b",".join([child.encoded() for child in self.children.values()])
        return b"[%b]" % text if self.kind == "list" else b'{"$":"%b","v":[%b]}' % (self.kind.encode(), text)


class Merge:
    """Takes state trees and aliases one rank after the other."""

    def __init__(self) -> None:
        self._root: _Node | None = None
        self._aliases: dict[str, str | None] = {}

    def add(self, tree: msgspec.Raw, aliases: Mapping[str, str]) -> None:
        """Of one rank."""
        data = bytes(tree)
        if self._root is None:
            self._root = _Node(data)
        else:
            self._root.merge(data)
        for alias, name in aliases.items():
            if self._aliases.setdefault(alias, name) != name:
                self._aliases[alias] = None

    @property
    def tree(self) -> msgspec.Raw:
        """The merged tree."""
        if self._root is None:
            raise FormatError("no state tree")
        return msgspec.Raw(self._root.encoded())

    def aliases(self, tensors: Mapping[str, object]) -> dict[str, str]:
        """Those of all ranks, sorted. One that stands for different tensors, or is itself the name of one of the
        ``tensors`` on some rank, is left out."""
        return {a: name for a, name in sorted(self._aliases.items()) if name is not None and a not in tensors}
