"""Small objects of a run: records read with the object's name in every error, and the store's own clock."""

from __future__ import annotations

import uuid

from ckptd.errors import FormatError, IntegrityError, NotFound, TooLarge
from ckptd.format.keys import LEASES
from ckptd.format.records import AnyRecord, decode
from ckptd.limits import SMALL_RECORD_BYTES_MAX
from ckptd.storage import Backend

DAMAGED = "the object is damaged; `ckptd verify` names the newest checkpoint that is good"


def place(backend: Backend, key: str) -> str:
    """An object as messages name it."""
    return f"{backend.url}/{key}"


def damaged(where: str, what: str) -> IntegrityError:
    """The error for an object that is not what another one promises. ``what`` goes on from the object's name."""
    return IntegrityError(f"{where} {what}", hint=DAMAGED)


def token() -> str:
    """A name that nobody else has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


async def read_record(
    backend: Backend, key: str, kind: type[AnyRecord], *, limit_bytes: int = SMALL_RECORD_BYTES_MAX
) -> AnyRecord:
    """The record at ``key``. Raises :class:`NotFound`, and :class:`FormatError` (or :class:`UnsupportedFormat`) that
    names the object."""
    try:
        data = await backend.get(key, limit_bytes=limit_bytes)
    except TooLarge as error:
        raise FormatError(f"{place(backend, key)}: {error.message}", hint=DAMAGED) from error
    return decode_at(place(backend, key), data, kind)


def decode_at(where: str, data: bytes | memoryview, kind: type[AnyRecord]) -> AnyRecord:
    """:func:`ckptd.format.records.decode`, with the object's name in the error."""
    try:
        return decode(data, kind)
    except FormatError as error:
        raise type(error)(f"{where}: {error.message}", hint=error.hint or DAMAGED) from None


async def exists(backend: Backend, key: str) -> bool:
    """Whether an object is there. Raises :class:`StorageError` where the store cannot tell."""
    try:
        await backend.head(key)
    except NotFound:
        return False
    return True


async def store_clock(backend: Backend) -> float:
    """What time it is for the store, in Unix seconds: the only clock by which leases expire. Needs to write."""
    key = f"{LEASES}clock-{token()}.json"
    await backend.put(key, b"{}")
    try:
        return (await backend.head(key)).modified_seconds
    finally:
        await backend.delete([key])
