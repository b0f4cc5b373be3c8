"""Slot records: the state of each slot, as it stands in the arena itself.

A record is written in the older of two places under the next sequence number and sealed by a checksum, so that a
writer that dies half-way leaves the previous record readable. Ownership alternates with the state, so there is one
writer at a time: the trainer moves a slot FREE → FILLING → SEALED (or back to FREE), the daemon SEALED → DURABLE →
FREE; the trainer may take a DURABLE slot as if it were FREE.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from ckptd.errors import FormatError
from ckptd.format.keys import Version

RECORD_BYTES = 256
"""Room for one copy of a record; two copies a slot."""

# sequence, state, generation, step, ticket, shard, held, doc, filled-by pid, doc digest, unhealthy
_FIELDS = struct.Struct("<QIIQQQQQQ16sI")
_CHECK = struct.Struct("<Q")


class SlotState(IntEnum):
    """How far a slot is. The values lie in memory."""

    FREE = 0
    FILLING = 1
    SEALED = 2
    DURABLE = 3


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a slot holds."""

    state: SlotState = SlotState.FREE
    step: int = 0
    generation: int = 0
    ticket: int = 0
    """Grows by one with each fill of any slot of the arena: tells this content from what lay here before."""
    shard_bytes: int = 0
    """Length of the shard, from the slot's start."""
    doc_bytes: int = 0
    """Length of the encoded snapshot record, which lies behind the snapshot's bytes on the next page boundary."""
    doc_digest: bytes = bytes(16)
    pid: int = 0
    """The trainer that filled it, in the trainer's own PID namespace; for messages only."""
    held_bytes: int = 0
    """Length of the snapshot's bytes: the shard, and resident pieces behind it. Less than the shard means the shard
    alone."""
    unhealthy: bool = False
    """Not all of its values are finite."""

    @property
    def version(self) -> Version:
        return Version(self.step, self.generation)


def read_record(copies: memoryview) -> tuple[int, SlotRecord]:
    """The newest valid copy and its sequence number. Memory that was never written is sequence 0 and FREE.

    Raises :class:`FormatError` where neither copy is valid.
    """
    found: list[tuple[int, SlotRecord]] = []
    for number in (0, 1):
        raw = bytes(copies[number * RECORD_BYTES : number * RECORD_BYTES + _FIELDS.size + _CHECK.size])
        if not any(raw):
            found.append((0, SlotRecord()))
        else:
            if _CHECK.unpack_from(raw, _FIELDS.size)[0] != xxh3_64_intdigest(raw[: _FIELDS.size]):
                continue
            sequence, state, generation, step, ticket, shard, held, doc, pid, digest, bad = _FIELDS.unpack_from(raw)
            if state > SlotState.DURABLE:
                continue
            record = SlotRecord(SlotState(state), step, generation, ticket, shard, doc, digest, pid, held, bool(bad))
            found.append((sequence, record))
    if not found:
        raise FormatError("both copies of a slot record are damaged")
    return max(found, key=lambda item: item[0])


def write_record(copies: memoryview, record: SlotRecord) -> None:
    """Write ``record`` in the older copy's place. One writer at a time, see the module's text."""
    sequence, _ = read_record(copies)
    sequence += 1
    fields = _FIELDS.pack(
        sequence,
        record.state,
        record.generation,
        record.step,
        record.ticket,
        record.shard_bytes,
        record.held_bytes,
        record.doc_bytes,
        record.pid,
        record.doc_digest,
        record.unhealthy,
    )
    start = (sequence % 2) * RECORD_BYTES
    copies[start : start + _FIELDS.size + _CHECK.size] = fields + _CHECK.pack(xxh3_64_intdigest(fields))
