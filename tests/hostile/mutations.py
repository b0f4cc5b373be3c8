"""What becomes of good bytes in hostile hands: bits and pieces of them changed, and the same for their JSON values."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    -(2**63),
    1.5,
    1e308,
    "",
    "..",
    "../../etc/passwd",
    "/",
    "\0",
    "\ud800",
    "a" * 5000,
    [],
    [[]],
    {},
    {"$": "tuple", "v": []},
    {"$": "int", "v": "0x" + "f" * 5000},
    {"$": "bytes", "v": "===="},
)
STRUCTURE = b'{}[]",:\\0123456789.eE-$~/ntf'


def changed(data: bytes, chance: random.Random) -> bytes:
    """The same, but for one to four changes."""
    for _ in range(chance.randint(1, 4)):
        data = _of_the_value(data, chance) if chance.random() < 0.4 else _of_the_bytes(bytearray(data), chance)
    return data


def _of_the_bytes(data: bytearray, chance: random.Random) -> bytes:
    if not data:
        return chance.randbytes(chance.randint(0, 64))
    at, stop = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    match chance.randrange(7):
        case 0:
            data[at] ^= 1 << chance.randrange(8)
        case 1:
            data[at] = chance.choice(STRUCTURE)
        case 2:
            del data[at : at + chance.randint(1, 16)]
        case 3:
            del data[at:]
        case 4:
            data[at:at] = chance.choice(STRUCTURE).to_bytes() * chance.choice([1, 2, 100])
        case 5:
            data[at:at] = data[at:stop][:2000]
        case _:
            data[at : at + 8] = chance.choice([b"\xff" * 8, bytes(8), b"\x80" + bytes(7), chance.randbytes(8)])
    return bytes(data)


def _of_the_value(data: bytes, chance: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _of_the_bytes(bytearray(data), chance)
    return json.dumps(_replaced(value, chance), ensure_ascii=chance.random() < 0.9).encode(errors="surrogatepass")


def _replaced(value: Any, chance: random.Random) -> Any:
    """Some value in it is another one, is gone, or is there twice."""
    if chance.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return chance.choice(ODD)
    if isinstance(value, dict):
        name = chance.choice(list(value))
        match chance.randrange(5):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return {**value, chance.choice(["$", "v", "kind", "x" * 300, name + "0"]): value[name]}
            case _:
                return {**value, name: _replaced(value[name], chance)}
    at = chance.randrange(len(value))
    match chance.randrange(5):
        case 0:
            return [*value[:at], *value[at + 1 :]]
        case 1:
            return [*value, value[at]]
        case _:
            return [*value[:at], _replaced(value[at], chance), *value[at + 1 :]]
