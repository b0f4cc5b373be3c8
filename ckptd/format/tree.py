"""The state tree: whatever is not a tensor, as typed JSON that gives back exactly what went in.

Plain JSON values stand for themselves. Everything else is an object with the member ``"$"`` that names its type, so
that integers beyond 64 bits, nan, tuples, bytes, and dicts whose keys are not strings survive, in order. A tensor is
a reference to a name in the layout. A value without a codec is an error that names its path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from ckptd.errors import FormatError, StateError
from ckptd.format.names import element, join, segment
from ckptd.limits import NAME_BYTES_MAX, TREE_DEPTH_MAX

Path = tuple[str, ...]
EncodeLeaf = Callable[[object, Path], dict[str, Any] | None]
"""Called first for each value that is not plain: a tagged object, or ``None`` where it has no codec for it."""
DecodeLeaf = Callable[[str, dict[str, Any]], object]
"""Called with the tag and the members of each tagged object that this module does not know."""

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
        return value if math.isfinite(cast(float, value)) else {"$": "float", "v": repr(value)}
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
        return {"$": "complex", "v": [number_.real.hex(), number_.imag.hex()]}
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


def _encode_items(value: dict[Any, Any], leaf: EncodeLeaf, path: Path) -> list[Any]:
    items: list[Any] = []
    for key, item in value.items():
        try:
            step = segment(key)
        except (AttributeError, TypeError):
            raise StateError(
                f"{join(path) or 'the state'}: a dict key of type {type(key).__name__} cannot be kept",
                hint="keys may be str, int, float, bool, None, bytes, or tuples of these",
            ) from None
        if len(step.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
            raise StateError(f"{join(path)}: a dict key is longer than {NAME_BYTES_MAX} bytes")
        items.append([encode_tree(key, _no_leaf, (*path, step)), encode_tree(item, leaf, (*path, step))])
    return items


def _no_leaf(value: object, path: Path) -> dict[str, Any] | None:
    return None


def decode_tree(node: Any, leaf: DecodeLeaf, depth: int = 0) -> Any:
    """The inverse of :func:`encode_tree`. Raises :class:`FormatError` for anything it could not have written."""
    if depth > TREE_DEPTH_MAX + 1:
        raise FormatError(f"state tree nested deeper than {TREE_DEPTH_MAX} levels")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return _decode_elements(cast(Iterable[Any], node), leaf, depth)
    if not isinstance(node, dict):
        raise FormatError(f"state tree holds a {type(node).__name__}")
    members = cast(dict[str, Any], node)
    tag = members.get("$")
    if not isinstance(tag, str):
        raise FormatError("state tree holds an object without a type")
    try:
        return _decode_tagged(tag, members, leaf, depth)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError(f"state tree: malformed value of type {tag[:40]!r}: {error}") from None


def _decode_tagged(tag: str, members: dict[str, Any], leaf: DecodeLeaf, depth: int) -> Any:
    value: Any = members.get("v")
    match tag:
        case "int":
            return int(value, 16)
        case "float":
            return float(value)
        case "complex":
            return complex(float.fromhex(value[0]), float.fromhex(value[1]))
        case "str":
            return base64.b64decode(value, validate=True).decode("utf-8", "surrogatepass")
        case "bytes":
            return base64.b64decode(value, validate=True)
        case "bytearray":
            return bytearray(base64.b64decode(value, validate=True))
        case "tuple" | "set" | "frozenset" | "deque":
            items = _decode_elements(value, leaf, depth)
            if tag == "deque":
                return deque(items, members.get("maxlen"))
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
        case "dict" | "odict" | "counter":
            return _decode_items(tag, value, leaf, depth)
        case _:
            return leaf(tag, members)


def _decode_elements(nodes: Iterable[Any], leaf: DecodeLeaf, depth: int) -> list[Any]:
    return [decode_tree(node, leaf, depth + 1) for node in nodes]


def _decode_items(tag: str, value: Any, leaf: DecodeLeaf, depth: int) -> Any:
    result: dict[Any, Any] = {"dict": dict, "odict": OrderedDict, "counter": Counter}[tag]()
    for pair in value:
        key_node, item = pair
        key = decode_tree(key_node, leaf, depth + 1)
        if key in result:
            raise FormatError(f"state tree: duplicate key {key!r}")
        result[key] = decode_tree(item, leaf, depth + 1)
    return result


def decode_json(data: bytes | memoryview) -> Any:
    """JSON text to Python objects. Raises :class:`FormatError`."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FormatError(f"not JSON: {error}") from None
