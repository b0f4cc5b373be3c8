"""Names of tensors inside a checkpoint: the path to a value, written so that no two paths share a name.

``model/layers.0.weight``, ``optimizer/state/layers.0.weight/exp_avg``. Segments are joined by ``/``. String keys stand
as they are, with ``~`` and ``/`` escaped as in JSON Pointer (RFC 6901), the empty string as ``~e``, and the one name
that safetensors reserves as ``~m``; other keys carry their type: ``~i25`` is the integer 25, ``~l0`` the first element
of a list. ``~p0`` marks a piece within a shard.
"""

from __future__ import annotations

from collections.abc import Iterable

Key = str | int | float | bool | None | tuple["Key", ...] | bytes
"""What a dict in the state may have as a key."""


_RESERVED = {"": "~e", "__metadata__": "~m"}


def segment(key: Key) -> str:
    """One path segment for a dict key. Injective over all keys, and never empty.

    Raises :class:`TypeError` for any other key, :class:`ValueError` for an integer of thousands of digits.
    """
    if isinstance(key, str):
        if key in _RESERVED:
            return _RESERVED[key]
        if key.isascii() and "~" not in key and "/" not in key:
            return key  # nearly all keys, and a save may have a hundred thousand
        # A lone surrogate cannot be written as UTF-8; spelled out, it stays distinct.
        plain = key.replace("~", "~0").replace("/", "~1")
        return "".join(f"~u{ord(c):x};" if 0xD800 <= ord(c) <= 0xDFFF else c for c in plain)
    if isinstance(key, bool):
        return f"~b{int(key)}"
    if isinstance(key, int):
        return f"~i{key}"
    if isinstance(key, float):
        return f"~f{key.hex()}"
    if key is None:
        return "~n"
    if isinstance(key, bytes):
        return f"~x{key.hex()}"
    if isinstance(key, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]  # whatever a user's dict holds
        return "~t" + ",".join(_item(item) for item in key) + ";"
    raise TypeError(f"not a key that can be named: {type(key).__name__}")


def _item(key: Key) -> str:
    """An item of a tuple: a string's own commas and semicolons must not end it."""
    text = segment(key)
    return text.replace(",", "~c").replace(";", "~s") if isinstance(key, str) else text


def element(number: int) -> str:
    """The path segment for the element of a list or tuple."""
    return f"~l{number}"


def join(segments: Iterable[str]) -> str:
    """The name of a path, given by its segments."""
    return "/".join(segments)


def piece_name(name: str, number: int, count: int) -> str:
    """The name of one piece in its shard's header: the tensor's own where the rank holds one piece of it."""
    return name if count == 1 else f"{name}~p{number}"
