"""Doubting a checkpoint: what was restored from it failed again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.tiers import open_tiers
from ckptd.checkpoint.verdicts import REASON_CHARACTERS_MAX, record_verdict
from ckptd.errors import NotFound
from ckptd.format.keys import Version
from ckptd.storage import Backend


async def doubt(backends: Sequence[Backend], generation: int, *, by: str, reason: str) -> Version | None:
    """Mark suspect, and unhealthy, what a generation was opened from, in every tier that has it. Durable on return.
    ``None``: it was opened from nothing. Raises :class:`StorageError` where no tier can be asked, or none took the
    marks."""
    tiers = await open_tiers(backends)
    version: Version | None = None
    for run in tiers.runs:
        with contextlib.suppress(NotFound):
            opened_from = (await run.generation(generation)).opened_from
            version = None if opened_from is None else opened_from.version
            break
    if version is None:
        return None

    async def mark(run: Run) -> bool:
        if not await record_verdict(run, version, good=False, by=by, reason=reason):
            return False
        # Its bytes may be just what was saved: a later verification must not wash this off.
        await run.add_mark(version, "unhealthy", by=by, reason=reason[:REASON_CHARACTERS_MAX])
        return True

    await tiers.wherever_committed(version, mark)
    return version
