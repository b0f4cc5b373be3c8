"""Values that are neither plain nor tensors, as plain values under a tag, and back.

Nothing that was read decides which code runs: a tag leads to a codec of this module or to one that the program has
registered, and an enum to a class that the program has imported already.
"""

# torch and numpy leave types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import base64
import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
import torch

from ckptd.errors import FormatError, StateError, UsageError
from ckptd.format.names import join
from ckptd.format.tree import Path, decode_tree

if TYPE_CHECKING:
    from ckptd_client.capture.walk import Walk

T = TypeVar("T")

_NUMERIC = "?bhilqBHILQefdFD"
"""Type characters of numpy's numbers; longer floats differ from machine to machine."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one class are kept."""

    kind: type[Any]
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_by_class: dict[type[Any], Codec] = {}
_by_name: dict[str, Codec] = {}


def register_codec(kind: type[T], name: str, encode: Callable[[T], object], decode: Callable[[Any], T]) -> None:
    """Keep values of exactly this class in checkpoints, under ``name``.

    ``encode`` turns a value into tensors and plain values; ``decode`` is its inverse, and runs only in a process that
    has registered it. Raises :class:`UsageError` where the class or the name is taken by another codec.
    """
    codec = Codec(kind, name, encode, decode)
    for known in (_by_class.get(kind), _by_name.get(name)):
        if known is not None and (known.kind, known.name) != (kind, name):
            raise UsageError(f"codec {name!r} for {kind.__qualname__}: {known.name!r} is for {known.kind.__qualname__}")
    _by_class[kind] = _by_name[name] = codec


# What a checkpoint holds in the place of a value that takes more than its bytes to make


class SavedTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor in the checkpoint, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class PerRank:
    """In what all ranks have in common: a value that was each rank's own."""


@dataclass(frozen=True, slots=True)
class SavedArray:
    """A numpy array in the checkpoint: a tensor, and the array's own dtype."""

    tensor: SavedTensor
    dtype: str


@dataclass(frozen=True, slots=True)
class SavedGenerator:
    """A random number generator in the checkpoint."""

    device: str
    state: bytes


@dataclass(frozen=True, slots=True)
class SavedObject:
    """What a registered codec made of an object."""

    codec: str
    value: object

    def __hash__(self) -> int:  # so that a set may hold it; its value may be a list
        return hash(self.codec)


def encode(value: object, path: Path, walk: Walk) -> dict[str, Any] | None:
    """The tagged form of a value, or ``None`` where there is no codec for it."""
    codec = _by_class.get(type(value))
    if codec is not None:
        return {"$": "codec", "name": codec.name, "v": walk.value(codec.encode(value), path)}
    match value:
        case enum.Enum():
            kind = type(value)
            return {"$": "enum", "class": f"{kind.__module__}:{kind.__qualname__}", "v": walk.value(value.value, path)}
        case np.ndarray():
            tensor = _array_tensor(value, path)
            return {"$": "ndarray", "dtype": value.dtype.str, "v": walk.tensor(join(path), tensor)}
        case np.generic() if value.dtype.char in _NUMERIC:
            return {"$": "npscalar", "dtype": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
        case torch.dtype():
            return {"$": "torch.dtype", "v": str(value).removeprefix("torch.")}
        case torch.device():
            return {"$": "torch.device", "v": str(value)}
        case torch.Size():
            return {"$": "torch.Size", "v": list(value)}
        case torch.Generator():
            state = base64.b64encode(value.get_state().numpy().tobytes()).decode()
            return {"$": "torch.Generator", "device": str(value.device), "v": state}
        case _:
            return None


def _array_tensor(array: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    """The array's own memory as a tensor where torch can look at it, else a copy."""
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if not native.flags.writeable or any(stride < 0 or stride % native.itemsize for stride in native.strides):
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise StateError(
            f"{join(path)}: an array of {array.dtype} cannot be saved", hint="only arrays of numbers can"
        ) from None


def decode_value(node: Any) -> object:
    """The value of a node of a state tree: plain, with a reference where it has a tensor. Raises
    :class:`FormatError`."""

    def leaf(tag: str, members: dict[str, Any]) -> object:
        name = members.get("v")
        if tag == "tensor" and type(name) is str:  # by far the most frequent
            return SavedTensor(name)
        return decode(tag, members, decode_tree(members.get("v"), leaf))

    return decode_tree(node, leaf)


def decode(tag: str, members: dict[str, Any], value: object) -> object:
    """The value of a tagged node, ``value`` being its decoded member ``v``. Raises :class:`FormatError`."""
    match tag:
        case "tensor" if isinstance(value, str):
            return SavedTensor(value)
        case "per_rank":
            return PerRank()
        case "ndarray" if isinstance(value, SavedTensor):
            return SavedArray(value, _numeric(members["dtype"]).str)
        case "npscalar":
            return np.frombuffer(base64.b64decode(cast(str, value), validate=True), _numeric(members["dtype"]))[0]
        case "torch.dtype":
            found = getattr(torch, cast(str, value))
            return found if isinstance(found, torch.dtype) else _unknown(tag, value)
        case "torch.device":
            return torch.device(cast(str, value))
        case "torch.Size":
            return torch.Size(cast("list[int]", value))
        case "torch.Generator":
            return SavedGenerator(str(members["device"]), base64.b64decode(cast(str, value), validate=True))
        case "enum":
            return _enum_class(members["class"])(value)
        case "codec":
            return SavedObject(str(members["name"]), value)
        case _:
            return _unknown(tag, value)


def _unknown(tag: str, value: object) -> object:
    raise FormatError(f"state tree: no codec for a value of type {tag[:40]!r}", hint="upgrade ckptd")


def _numeric(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.char not in _NUMERIC:
        raise FormatError(f"state tree: an array of {text[:40]!r}")
    return dtype


def _enum_class(text: str) -> type[enum.Enum]:
    module, _, qualname = text.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return found
    raise FormatError(
        f"state tree: a value of the enum {text[:200]}, which this program does not have",
        hint="import its module before the restore",
    )


def registered(name: str) -> Codec:
    """The codec of this name. Raises :class:`FormatError` where the program has registered none."""
    try:
        return _by_name[name]
    except KeyError:
        raise FormatError(
            f"state tree: a value of the codec {name[:80]!r}, which this program has not registered",
            hint="call ckptd_client.register_codec before the restore",
        ) from None
