"""Recording what was found out about a checkpoint, as a mark on it."""

from __future__ import annotations

from ckptd.checkpoint.run import Run
from ckptd.errors import NotFound
from ckptd.format.keys import Version, manifest_key, tombstone_key

REASON_CHARACTERS_MAX = 1000
"""Of an error, in a mark."""


async def record_verdict(run: Run, version: Version, *, good: bool, by: str, reason: str) -> bool:
    """Mark a checkpoint ``verified``, or ``suspect``, which takes back an earlier verdict. Durable on return.

    Nothing is added to what its marks say already, nor to a checkpoint that is being deleted, as parts of it may be
    gone for that reason. Returns whether the verdict stands. Raises :class:`StorageError`.
    """
    standing = await run.standing(version)
    if (standing.verified and good) or (standing.suspect and not good):
        return True
    if await _is_going(run, version):
        return False
    await run.add_mark(version, "verified" if good else "suspect", by=by, reason=reason[:REASON_CHARACTERS_MAX])
    return True


async def _is_going(run: Run, version: Version) -> bool:
    try:
        await run.backend.head(tombstone_key(version))
        return True
    except NotFound:
        pass
    try:
        await run.backend.head(manifest_key(version))
    except NotFound:
        return True
    return False
