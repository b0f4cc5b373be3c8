"""Documents that would take all memory or time if they were believed: ``python -m tests.hostile.heavy``, in a process
with little of either. Prints what became of each."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckptd.errors import CkptdError
from ckptd.limits import MIB
from tests.hostile.decoders import decoders

MEMORY_BYTES = 512 * MIB
"""Beyond what the process has when it begins."""
CPU_SECONDS = 60
DOCUMENT_BYTES = 4 * MIB
MANY = 20_000

Change = Callable[[dict[str, Any]], None]


def documents() -> Iterator[tuple[str, str, bytes]]:
    """Name, decoder, bytes."""
    for decoder in ("run", "manifest", "receipt", "index", "tree", "lease", "message to the daemon"):
        yield "nested arrays", decoder, b"[" * DOCUMENT_BYTES
        yield "nested objects", decoder, b'{"a":' * (DOCUMENT_BYTES // 5)
        yield "a long number", decoder, b"9" * DOCUMENT_BYTES
        yield "a long string", decoder, b'"' + b"\\u0000" * (DOCUMENT_BYTES // 6) + b'"'
        yield "many members alike", decoder, b"{" + b'"a":1,' * (DOCUMENT_BYTES // 6) + b'"a":1}'
        yield "many empty arrays", decoder, b"[" + b"[]," * (DOCUMENT_BYTES // 3) + b"[]]"
    for name, decoder, change in CHANGES:
        value = json.loads(max(decoders()[decoder].examples, key=_richness))
        change(value)
        yield name, decoder, json.dumps(value).encode()
    yield "a header over all memory", "shard header", (2**62).to_bytes(8, "little") + b"{}"
    yield "many pieces", "shard header", _header(b'"%d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}')
    yield (
        "huge shapes",
        "shard header",
        _header(b'"%d":{"dtype":"F64","shape":[9223372036854775807],"data_offsets":[0,1]}'),
    )


def _richness(data: bytes) -> int:
    return (b'"box"' in data) * 1_000_000 + len(data)


def _header(entry: bytes) -> bytes:
    text = b"{" + b",".join(entry % number for number in range(MANY)) + b"}"
    return len(text).to_bytes(8, "little") + text


def _overlapping(value: dict[str, Any]) -> None:
    """Each overlaps each: nobody may compare all pairs."""
    tensor = value["snapshot"]["layout"]["tensors"][0]
    tensor["shape"], tensor["dtype"] = [MANY * 2, 3], "uint8"
    piece = {"at": 4096, "bytes": 3 * MANY}
    tensor["pieces"] = [{**piece, "box": {"offsets": [start, 0], "lengths": [MANY, 3]}} for start in range(MANY // 2)]


def _countless(value: dict[str, Any]) -> None:
    value["snapshot"]["layout"]["tensors"][0]["shape"] = [2**63 - 1] * 64


def _large_world(value: dict[str, Any]) -> None:
    value["world"] = 100_000


def _cells(value: dict[str, Any]) -> None:
    for entry in value["tensors"]:
        entry |= {
            "shape": [2**62] * 60,
            "pieces": [],
            "grid": {"chunks": [1] * 60, "ranks": {"start": 0, "stop": 99_999, "step": 1}},
        }


def _pieces_of_an_index(value: dict[str, Any]) -> None:
    entry = value["tensors"][0]
    entry.pop("grid", None)
    entry["shape"] = [MANY * 2, 3]
    entry["pieces"] = [
        {"at": 0, "box": {"offsets": [start, 0], "lengths": [MANY, 3]}, "bytes": 1, "rank": 0} for start in range(MANY)
    ]


CHANGES: list[tuple[str, str, Change]] = [
    ("overlapping boxes", "proof", _overlapping),
    ("countless elements", "proof", _countless),
    ("a world of many", "proof", lambda value: _large_world(value["snapshot"])),
    ("a world of many", "manifest", _large_world),
    ("countless cells", "index", _cells),
    ("overlapping boxes", "index", _pieces_of_an_index),
    ("an integer beyond 64 bits", "receipt", lambda value: value["shard"].update(bytes=2**64)),
    ("an integer of many digits", "receipt", lambda value: value["shard"].update(bytes=10**4000)),
    ("a key that leads out", "receipt", lambda value: value["shard"].update(attempt="../../x")),
]


def main() -> None:
    """One line for each document."""
    found = list(documents())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    for name, decoder, data in found:
        try:
            decoders()[decoder].decode(data)
        except CkptdError as error:
            print(f"refused\t{decoder}\t{name}\t{str(error)[:100]!r}", flush=True)
        else:
            print(f"taken\t{decoder}\t{name}", flush=True)
    print("end")


if __name__ == "__main__":
    main()
