"""Everything that takes bytes from outside, and good bytes for each of it."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from ckptd.arena import Arena, SlotRecord, SlotState
from ckptd.arena.memory import ArenaShape
from ckptd.arena.slots import RECORD_BYTES, read_record, write_record
from ckptd.checkpoint.locating import sought
from ckptd.checkpoint.regions import region
from ckptd.errors import FormatError
from ckptd.format.digests import digest, hex_digest
from ckptd.format.keys import LogKey, parse_version
from ckptd.format.log import Segment, columns_of, decode_segment, encode_segment
from ckptd.format.proof import prove
from ckptd.format.records import (
    Common,
    GenerationRecord,
    Index,
    Lease,
    Manifest,
    Mark,
    Parent,
    Receipt,
    ReceiptList,
    Record,
    Run,
    Skipped,
    Snapshot,
    Tombstone,
    decode,
    decode_layout,
    encode,
)
from ckptd.format.shard import read_header
from ckptd.format.tree import decode_json, decode_tree
from ckptd.pulse.page import STATUS_BYTES, Phase, StatusPage
from ckptd.pulse.rows import ROWS_BYTES, Rows
from ckptd.wire import messages

GOLDEN = Path(__file__).parent.parent / "golden"
EXAMPLE_BYTES_MAX = 60_000
ARENA = ArenaShape(1, 8192)
WORLD = 6


@dataclass(frozen=True)
class Decoder:
    """A way in."""

    name: str
    decode: Callable[[bytes], object]
    examples: tuple[bytes, ...]


@cache
def decoders() -> dict[str, Decoder]:
    """By name."""
    found = [
        Decoder("run", partial(_record, kind=Run), _golden("run.json")),
        Decoder("generation", partial(_record, kind=GenerationRecord), _golden("generations/*.json")),
        Decoder("manifest", _manifest, _golden("manifests/*.json")),
        Decoder("receipt", _receipt, _golden("checkpoints/*/rank-*-of-*.json")),
        Decoder("proof", lambda data: prove([data]), _golden("checkpoints/*/rank-00000-of-00001.json")),
        Decoder("skipped", partial(_record, kind=Skipped), _golden("checkpoints/*/rank-00001-of-00002.json")),
        Decoder("index", _index, _golden("checkpoints/*/index-*.json")),
        Decoder("receipts", partial(_record, kind=ReceiptList), _golden("checkpoints/*/receipts-*.json")),
        Decoder("common", _common, _golden("checkpoints/*/common.json")),
        Decoder("tree", _tree, tuple(_trees())),
        Decoder("mark", partial(_record, kind=Mark), _golden("marks/*/*.json")),
        Decoder("lease", partial(_record, kind=Lease), _golden("leases/*.json")),
        Decoder("tombstone", partial(_record, kind=Tombstone), _golden("tombstones/*.json")),
        Decoder("shard header", read_header, _golden("checkpoints/*/*.safetensors")),
        Decoder("version", lambda data: parse_version(data.decode("latin-1")), (b"000000001000-g000003",)),
        Decoder("log segment", _log_segment, _log_segments()),
        Decoder(
            "log key", lambda data: LogKey.parse(data.decode("latin-1")), (str(LogKey(3, 0, "0" * 32, 1, 9)).encode(),)
        ),
        Decoder("rows", _rows, (_rows_bytes(),)),
        Decoder("slot record", _slot_record, _slot_records()),
        Decoder("arena", _arena, (_arena_bytes(),)),
        Decoder("status page", _status_page, (_status_bytes(),)),
        Decoder("message to the daemon", messages.decode_incoming, _messages(messages.Incoming)),
        Decoder("message to a trainer", _outgoing, _messages(messages.Outgoing)),
    ]
    return {decoder.name: decoder for decoder in found}


def _golden(pattern: str) -> tuple[bytes, ...]:
    found = {path.read_bytes()[:EXAMPLE_BYTES_MAX] for path in sorted(GOLDEN.glob(f"v*/*/{pattern}"))}
    assert found, pattern
    return tuple(sorted(found, key=lambda data: (len(data), data)))[:6]


def _record(data: bytes, kind: type[Record]) -> object:
    found = decode(data, kind)
    assert decode(encode(found), kind) == found  # whatever is taken can be written
    return found


def _manifest(data: bytes) -> object:
    """With what a reader does first: find each tensor, and each rank's receipt."""
    manifest = decode(data, Manifest)
    for entry in manifest.index or ():
        sought(entry, manifest.rank_lists, region(entry.shape), manifest.world)
    return manifest


def _index(data: bytes) -> object:
    index = decode(data, Index)
    return [sought(entry, index.rank_lists, region(entry.shape), WORLD) for entry in index.tensors]


def _receipt(data: bytes) -> object:
    """Its place in a proof aside: the snapshot, its layout and its tree."""
    receipt = decode(data, Receipt)
    snapshot = decode(receipt.snapshot, Snapshot)
    decode_layout(snapshot.layout)
    return _tree(bytes(snapshot.tree))


def _common(data: bytes) -> object:
    return _tree(bytes(decode(data, Common).tree))


def _tree(data: bytes) -> object:
    return decode_tree(decode_json(data), _leaf)


def _leaf(tag: str, members: dict[str, object]) -> object:
    if tag in ("tensor", "ndarray", "per_rank"):
        return tag
    raise FormatError(f"no codec for {tag[:100]}")


def _trees() -> list[bytes]:
    trees: list[bytes] = []
    for data in _golden("checkpoints/*/rank-*-of-*.json"):
        try:
            trees.append(bytes(decode(decode(data, Receipt).snapshot, Snapshot).tree))
        except FormatError:
            continue  # a rank that took no part
    return trees


def _slot_records() -> tuple[bytes, ...]:
    copies = bytearray(2 * RECORD_BYTES)
    found = [bytes(copies)]
    for state in SlotState:
        write_record(memoryview(copies), SlotRecord(state, 7, 1, 3, 4096, 100, bytes(16), 1, 4096))
        found.append(bytes(copies))
    return tuple(found)


def _slot_record(data: bytes) -> object:
    return read_record(memoryview(data.ljust(2 * RECORD_BYTES, b"\0")))


def _arena_bytes() -> bytes:
    arena = Arena.create(ARENA)
    try:
        arena.set_record(0, SlotRecord(SlotState.SEALED, 7, 1, 3, 4096, 100, digest(bytes(100)), 1, 4096))
        return bytes(arena.view[:12288])
    finally:
        arena.close()


def _arena(data: bytes) -> object:
    """A descriptor that somebody sent, and everything that is read of it before its content is trusted."""
    descriptor = os.memfd_create("sent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, ARENA.size_bytes)
        os.pwrite(descriptor, data[: ARENA.size_bytes], 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        arena = Arena(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        for number, record in enumerate(arena.records()):
            arena.shard(number, record).release()
            arena.held(number, record).release()
            arena.doc(number, record)
        return arena.id
    finally:
        arena.close()


def _status_bytes() -> bytes:
    page = bytearray(STATUS_BYTES)
    StatusPage(memoryview(page)).beat(5, Phase.STEP, 1.5)
    return bytes(page[:8192])


def _status_page(data: bytes) -> object:
    page = StatusPage(memoryview(bytearray(data[:STATUS_BYTES].ljust(STATUS_BYTES, b"\0"))))
    return page.last(), page.since(0)


def _rows_bytes() -> bytes:
    memory = bytearray(ROWS_BYTES)
    Rows(memoryview(memory)).write(5, {"loss": 1.5, "tokens": 8.0}, unix_seconds=1.8e9, step_seconds=0.5)
    return bytes(memory[:9216])  # the first row is there


def _rows(data: bytes) -> object:
    rows = Rows(memoryview(bytearray(data[:ROWS_BYTES].ljust(ROWS_BYTES, b"\0"))))
    return rows.life, rows.generation, rows.refused, rows.since(0)


def _log_segments() -> tuple[bytes, ...]:
    found = Segment(
        columns=columns_of([{"loss": 1.5, "tokens": 8.0}, {"loss": math.nan}]),
        first=1,
        generation=3,
        life="0" * 32,
        parent=Parent(generation=2, step=4),
        rank=0,
        run="run",
        step_seconds=(None, 0.5),
        steps=(5, 6),
        unix_seconds=(1.8e9, 1.8e9),
    )
    plain = encode(found)
    # One without its digest, so that what is behind that is reached as well.
    return encode_segment(found), plain


def _log_segment(data: bytes) -> object:
    try:
        found = decode_segment(data)
    except FormatError:
        head = b'{"format":1,"kind":"log","digest":"%s","segment":' % hex_digest(data).encode()
        found = decode_segment(head + data + b"}")
    assert decode_segment(encode_segment(found)) == found
    return found


def _messages(kinds: Any) -> tuple[bytes, ...]:
    """One of each kind, with the plainest values."""
    return tuple(messages.encode(kind(**_plain(kind))) for kind in kinds.__args__)


def _plain(kind: type[msgspec.Struct]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "at": messages.SlotRef(arena="0" * 32, slot=0, ticket=1),
        "tiers": (messages.TierOfRun(url="file:///run"),),
        "offers": (),
        "stats": {"bytes": 1.0},
        "status": {"pid": 1},
        "part": "page",
        "takeover": False,
        "read_only": False,
        "deadline_seconds": 1.0,
    }
    named = {"arena", "run", "launch", "reason", "version", "error", "message", "hint", "stage"}
    for field in msgspec.structs.fields(kind):
        values.setdefault(field.name, "text" if field.name in named else 1)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    return {name: value for name, value in values.items() if name in required}


def _outgoing(data: bytes) -> object:
    message = messages.decode_outgoing(data)
    return messages.as_error(message) if isinstance(message, messages.Refused | messages.Failed) else message
