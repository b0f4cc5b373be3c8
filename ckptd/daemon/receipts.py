"""Puts that only the first of several writers may win. An unclear answer is read back: never a guess."""

from __future__ import annotations

import asyncio
import logging

from ckptd.checkpoint.unchanged import described
from ckptd.daemon.fencing import check_run
from ckptd.errors import (
    AlreadyExists,
    FormatError,
    IntegrityError,
    NotFound,
    SaveError,
    SaveSkipped,
    Unavailable,
    first_line,
)
from ckptd.format.keys import Version, mark_key
from ckptd.format.records import Mark, Receipt, Skipped, decode, encode
from ckptd.limits import KIB, RECEIPT_BYTES_MAX
from ckptd.storage import Backend, settle

log = logging.getLogger(__name__)

SKIPPED_BYTES_MAX = 16 * KIB
"""Of a record that says that a rank takes no part; its reason has a thousand characters."""


async def put_first(backend: Backend, key: str, data: bytes) -> bytes:
    """What lies at ``key`` in the end: ``data``, or what another writer put there before. Durable on return."""
    try:
        await backend.put(key, data, if_absent=True)
        return data
    except (AlreadyExists, Unavailable) as error:
        try:
            found = await backend.get(key, limit_bytes=max(RECEIPT_BYTES_MAX, len(data)))
        except NotFound:
            raise error from None
        await settle(backend, key)
        return found


async def put_same(backend: Backend, key: str, data: bytes) -> None:
    """Put what everybody puts there. Raises :class:`IntegrityError` where something else is."""
    if await put_first(backend, key, data) != data:
        raise IntegrityError(f"{key}: another commit of this checkpoint wrote different bytes")


async def put_debug_mark(backend: Backend, version: Version) -> None:
    """Say of a checkpoint that is not there yet that it is for a post-mortem only. Durable on return."""
    mark = Mark(by="save", mark="debug", reason="asked for when it was saved", version=str(version))
    await put_same(backend, mark_key(version, "debug", "save"), encode(mark))


async def put_receipt(backend: Backend, key: str, receipt: Receipt) -> bytes:
    """The rank's receipt as it is stored in the end. Where another attempt with the same bytes was first, its receipt
    counts, and this attempt's shard is deleted.

    Raises :class:`SaveSkipped` where the rank has let the step go, :class:`SaveError` where another snapshot of the
    same step and rank is there.
    """
    data = await asyncio.to_thread(encode, receipt)
    found = await put_first(backend, key, data)
    if found == data:
        return data
    other = receipt_in(found, key)
    if bytes(other.snapshot) != bytes(receipt.snapshot) or described(other) != described(receipt):
        raise SaveError(f"{key} is the receipt of another snapshot of this step", hint="a step is saved once")
    if other.shard.attempt != receipt.shard.attempt:
        try:
            await backend.delete([receipt.shard.key])
        except Exception as error:
            log.warning("%s remains, of no use: %s", receipt.shard.key, first_line(error))
    return found


def receipt_in(data: bytes, key: str) -> Receipt:
    """The receipt at ``key``. Raises :class:`SaveSkipped` where the rank said instead that it takes no part,
    :class:`FormatError`."""
    reason = skip_reason(data)
    if reason is not None:
        raise SaveSkipped(f"{key}: skipped: {reason}")
    return decode(data, Receipt)


def skip_reason(data: bytes) -> str | None:
    """Why a rank takes no part, where that is what ``data`` says in the place of a receipt."""
    if len(data) > SKIPPED_BYTES_MAX:
        return None
    try:
        return decode(data, Skipped).reason
    except FormatError:
        return None


async def put_skipped(backend: Backend, key: str, version: Version, rank: int, *, run: str, reason: str) -> None:
    """Tell the daemons of other ranks that this rank takes no part, unless its receipt is there. Best effort: where it
    fails, or the root is not the run's, the others find out when their time is up. ``key``: where they look."""
    record = Skipped(generation=version.generation, rank=rank, reason=reason[:1000], run=run, step=version.step)
    try:
        await check_run(backend, run)
        await put_first(backend, key, encode(record))
    except Exception as error:
        log.warning("could not tell the other ranks that rank %d skips %s: %s", rank, version, first_line(error))


async def put_unhealthy(backend: Backend, version: Version, rank: int, reason: str) -> None:
    """Mark a checkpoint before it is committed: what this rank saved is of no use. Durable on return."""
    mark = Mark(by=f"rank {rank}", mark="unhealthy", reason=reason, version=str(version))
    await put_first(backend, mark_key(version, "unhealthy", f"rank-{rank:05d}"), encode(mark))
