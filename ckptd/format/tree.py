"""The state tree: whatever is not a tensor, as typed JSON that gives back exactly what went in.

Plain JSON values stand for themselves. Everything else is an object with the member ``"$"`` that names its type, so
that integers beyond 64 bits, nan, tuples, bytes, and dicts whose keys are not strings survive, in order. A tensor is
a reference to a name in the layout. A value without a codec is an error that names its path.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from ckptd.errors import FormatError, StateError
from ckptd.format.duplicates import refuse_duplicates
from ckptd.format.names import element, join, segment
from ckptd.limits import NAME_BYTES_MAX, TREE_DEPTH_MAX

Path = tuple[str, ...]
EncodeLeaf = Callable[[object, Path], dict[str, Any] | None]
"""Called first for each value that is not plain: a tagged object, or ``None`` where it has no codec for it."""
DecodeLeaf = Callable[[str, dict[str, Any]], object]
"""Called with the tag and the members of each tagged object that this module does not know."""

PER_RANK = "per_rank"
"""The type of a node in a tree of what ranks have in common, where their values differ. It has no value; decoding hands
it to ``leaf``, as any type that is not known here. :func:`encode_tree` writes none."""
_JSON_INTEGER_MAX = 2**53
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}


def encode_tree(value: object, leaf: EncodeLeaf, path: Path = ()) -> Any:
    """Typed JSON for ``value``, as Python objects that a JSON encoder takes.

    Raises :class:`StateError`, naming the path, for a value without a codec, a dict key that cannot be kept, or nesting
    deeper than :data:`TREE_DEPTH_MAX`.
    """
    if len(path) > TREE_DEPTH_MAX:
        raise StateError(f"{join(path[:4])}…: nested deeper than {TREE_DEPTH_MAX} levels", hint="is it a cycle?")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encode_string(cast(str, value))
    if kind is int:
        number = cast(int, value)
        return number if -_JSON_INTEGER_MAX <= number <= _JSON_INTEGER_MAX else {"$": "int", "v": hex(number)}
    if kind is float:
        return value if math.isfinite(cast(float, value)) else {"$": "float", "v": _bits(cast(float, value))}
    if kind is list:
        return [encode_tree(item, leaf, (*path, element(i))) for i, item in enumerate(cast(list[Any], value))]
    if kind in _SEQUENCES:
        return _encode_sequence(cast(Iterable[Any], value), kind, leaf, path)
    if kind in _MAPPINGS or kind is defaultdict:
        # A defaultdict comes back as a dict: its factory is code, which is never stored.
        return {"$": _MAPPINGS.get(kind, "dict"), "v": _encode_items(cast(dict[Any, Any], value), leaf, path)}
    if kind is bytes or kind is bytearray:
        data = bytes(cast(bytes, value))
        return {"$": kind.__name__, "v": base64.b64encode(data).decode()}
    if kind is complex:
        number_ = cast(complex, value)
        return {"$": "complex", "v": [_bits(number_.real), _bits(number_.imag)]}
    tagged = leaf(value, path)
    if tagged is None:
        raise StateError(
            f"{join(path) or 'the state'}: no codec for a value of type {kind.__module__}.{kind.__qualname__}",
            hint="keep it out of the state, or give it one with ckptd_client.register_codec",
        )
    return tagged


def _encode_string(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return {"$": "str", "v": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}
    return text


def _encode_sequence(value: Iterable[Any], kind: type, leaf: EncodeLeaf, path: Path) -> Any:
    items = list(value)
    if kind in (set, frozenset):
        items.sort(key=lambda item: (type(item).__name__, repr(item)))
    tagged: dict[str, Any] = {
        "$": _SEQUENCES[kind],
        "v": [encode_tree(item, leaf, (*path, element(i))) for i, item in enumerate(items)],
    }
    if kind is deque and cast(deque[Any], value).maxlen is not None:
        tagged["maxlen"] = cast(deque[Any], value).maxlen
    return tagged


def _bits(number: float) -> str:
    """The eight bytes of a double, most significant first: exact for every nan."""
    return struct.pack(">d", number).hex()


def _encode_items(value: dict[Any, Any], leaf: EncodeLeaf, path: Path) -> list[Any]:
    items: list[Any] = []
    seen: set[str] = set()
    for key, item in value.items():
        step = _step(key, path)
        if step in seen:  # nan, which differs from itself
            raise StateError(f"{join(path) or 'the state'}: two dict keys cannot be told apart: {key!r:.40}")
        seen.add(step)
        items.append([encode_tree(key, _no_leaf, (*path, step)), encode_tree(item, leaf, (*path, step))])
    return items


def _step(key: Any, path: Path) -> str:
    """A dict key as a path segment."""
    try:
        step = segment(key)
    except (TypeError, ValueError, RecursionError):
        raise StateError(
            f"{join(path) or 'the state'}: a dict key of type {type(key).__name__} cannot be kept",
            hint="keys may be str, int, float, bool, None, bytes, or tuples of these",
        ) from None
    if len(step.encode()) > NAME_BYTES_MAX:
        raise StateError(f"{join(path) or 'the state'}: a dict key is longer than {NAME_BYTES_MAX} bytes")
    return step


def _no_leaf(value: object, path: Path) -> dict[str, Any] | None:
    return None


def decode_tree(node: Any, leaf: DecodeLeaf, depth: int = 0) -> Any:
    """The inverse of :func:`encode_tree`. Raises :class:`FormatError` for anything that it could not have written."""
    if depth > TREE_DEPTH_MAX:
        raise FormatError(f"state tree nested deeper than {TREE_DEPTH_MAX} levels")
    if node is None or isinstance(node, bool | float | str):
        return node
    if isinstance(node, int):
        if not -_JSON_INTEGER_MAX <= node <= _JSON_INTEGER_MAX:
            raise FormatError("state tree: a plain number beyond 2**53")
        return node
    if isinstance(node, list):
        return _decode_elements(cast(Sequence[Any], node), leaf, depth)
    if not isinstance(node, dict):
        raise FormatError(f"state tree holds a {type(node).__name__}")
    members = cast(dict[str, Any], node)
    tag = members.get("$")
    if not isinstance(tag, str):
        raise FormatError("state tree holds an object without a type")
    try:
        return _decode_tagged(tag, members, leaf, depth)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise FormatError(f"state tree: malformed value of type {tag[:40]!r}: {error!s:.200}") from None


def _decode_tagged(tag: str, members: dict[str, Any], leaf: DecodeLeaf, depth: int) -> Any:
    if tag not in _TAGS:
        return leaf(tag, members)
    if members.keys() - {"$", "v"} - ({"maxlen"} if tag == "deque" else set()):
        raise ValueError("a member that its type does not have")  # to ignore it would be to give back another value
    value: Any = members["v"]
    match tag:
        case "int":
            return _decode_integer(value)
        case "float":
            return _decode_double(value, may_be_finite=False)
        case "complex":
            real, imaginary = value
            return complex(_decode_double(real), _decode_double(imaginary))
        case "str":
            return _decode_string(value)
        case "bytes":
            return _decode_bytes(value)
        case "bytearray":
            return bytearray(_decode_bytes(value))
        case "dict" | "odict" | "counter":
            return _decode_items(tag, value, leaf, depth)
        case _:
            return _decode_sequence(tag, members, leaf, depth)


_TAGS = {*_SEQUENCES.values(), *_MAPPINGS.values(), "int", "float", "complex", "str", "bytes", "bytearray"}


def _decode_integer(text: Any) -> int:
    number = int(text, 16)
    if hex(number) != text or -_JSON_INTEGER_MAX <= number <= _JSON_INTEGER_MAX:
        raise ValueError("not as an integer beyond 2**53 is written")
    return number


def _decode_double(text: Any, *, may_be_finite: bool = True) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(text))[0]
    if _bits(number) != text or (math.isfinite(number) and not may_be_finite):
        raise ValueError("not as such a number is written")
    return number


def _decode_bytes(text: Any) -> bytes:
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("not as base64 is written")
    return data


def _decode_string(text: Any) -> str:
    string = _decode_bytes(text).decode("utf-8", "surrogatepass")
    if isinstance(_encode_string(string), str):
        raise ValueError("a string that stands for itself")
    return string


def _decode_elements(nodes: Any, leaf: DecodeLeaf, depth: int) -> list[Any]:
    if not isinstance(nodes, list):
        raise TypeError("its elements are not an array")
    return [decode_tree(node, leaf, depth + 1) for node in cast(Sequence[Any], nodes)]


def _decode_sequence(tag: str, members: dict[str, Any], leaf: DecodeLeaf, depth: int) -> Any:
    items = _decode_elements(members["v"], leaf, depth)
    if tag == "tuple":
        return tuple(items)
    if tag == "deque":
        limit = members.get("maxlen")
        if "maxlen" in members and (type(limit) is not int or len(items) > limit):
            raise ValueError("more elements than its maxlen")
        return deque(items, limit)
    distinct = set(items) if tag == "set" else frozenset(items)
    if len(distinct) != len(items):
        raise ValueError("an element twice")
    return distinct


def _decode_items(tag: str, pairs: Any, leaf: DecodeLeaf, depth: int) -> Any:
    result: dict[Any, Any] = {"dict": dict, "odict": OrderedDict, "counter": Counter}[tag]()
    seen: set[str] = set()
    if not isinstance(pairs, list):
        raise TypeError("its items are not an array")
    for pair in cast(Sequence[Any], pairs):
        if not isinstance(pair, list):
            raise TypeError("an item is not an array")
        key_node, item = cast(Sequence[Any], pair)
        key = decode_tree(key_node, _no_tag, depth + 1)
        step = segment(key)  # raises for a key that could not have been written
        if step in seen or key in result:
            raise ValueError(f"duplicate key {key!r:.40}")
        seen.add(step)
        result[key] = decode_tree(item, leaf, depth + 1)
    return result


def _no_tag(tag: str, members: dict[str, Any]) -> object:
    raise ValueError(f"a key of type {tag[:40]!r}")


def decode_json(data: bytes | memoryview) -> Any:
    """JSON text to Python objects. Raises :class:`FormatError`, also where an object has a member twice."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FormatError(f"not JSON: {error}") from None
    refuse_duplicates(data, msgspec.json.encode(value))
    return value
