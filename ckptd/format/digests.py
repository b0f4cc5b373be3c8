"""Digests: xxh3-128 (XXH3, https://xxhash.com) over blocks; one digest over the packed block digests.

They find rot, tearing and mix-ups at memory speed. They are not a defence against a forger.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

DIGEST_BYTES = 16


def digest(data: bytes | memoryview) -> bytes:
    """16 bytes."""
    return xxh3_128_digest(data)


def hex_digest(data: bytes | memoryview) -> str:
    """32 hexadecimal digits; how a digest of a record is written in another record."""
    return xxh3_128_hexdigest(data)


def digest_blocks(view: memoryview, bounds: Iterable[tuple[int, int]]) -> bytes:
    """The packed digests of ``view[start:stop]`` for each of ``bounds``. Releases the GIL within each block."""
    return b"".join([xxh3_128_digest(view[start:stop]) for start, stop in bounds])


def first_difference(one: bytes, other: bytes) -> int | None:
    """The number of the first of the packed digests that differs from the other's, or is missing there."""
    if one == other:
        return None
    pairs = range(0, max(len(one), len(other)), DIGEST_BYTES)
    return next(at // DIGEST_BYTES for at in pairs if one[at : at + DIGEST_BYTES] != other[at : at + DIGEST_BYTES])
