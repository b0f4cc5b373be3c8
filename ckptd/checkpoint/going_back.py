"""What is done to a run's checkpoints when its loss went bad: the last one before that is kept, the later ones are not
gone on from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.standing import UNMARKED
from ckptd.checkpoint.tiers import open_tiers
from ckptd.checkpoint.verdicts import REASON_CHARACTERS_MAX
from ckptd.errors import StorageError
from ckptd.format.keys import Version
from ckptd.storage import Backend


async def pin_before(
    backends: Sequence[Backend], generation: int, step: int, *, by: str, reason: str
) -> Version | None:
    """Pin the newest good checkpoint, of those that a generation goes on from or has saved itself, from before a step,
    in every tier that has it. Durable on return. ``None``: there is none. Raises :class:`StorageError` where no tier
    can be asked, or none took the mark."""
    tiers = await open_tiers(backends)
    standings = await tiers.standings()
    own = [version for version in await tiers.line() if version.generation <= generation]
    version = next((v for v in own if v.step < step and standings.get(v, UNMARKED).good), None)
    if version is None:
        return None

    async def pin(run: Run) -> bool:
        if not (await run.standings()).get(version, UNMARKED).pinned:
            await run.add_mark(version, "pinned", by=by, reason=reason[:REASON_CHARACTERS_MAX])
        return True

    await tiers.wherever_committed(version, pin)
    return version


async def mark_from(
    backends: Sequence[Backend],
    generation: int,
    step: int,
    also: Iterable[Version] = (),
    *,
    by: str,
    reason: str,
) -> list[Version]:
    """Mark unhealthy what a generation has saved of a step and later ones, in every tier that answers, so that a
    restore takes one from before. ``also``: what it is about to commit; the mark is there first then. Durable on
    return. Returns what was not marked before. Raises :class:`StorageError` where the nearest tier took no mark."""
    tiers = await open_tiers(backends)
    marked: list[Version] = []
    for run in tiers.runs:
        try:
            marked += await _mark(run, generation, step, also, by=by, reason=reason)
        except StorageError:
            if run is tiers.runs[0]:
                raise
    return sorted(set(marked))


async def _mark(
    run: Run, generation: int, step: int, also: Iterable[Version], *, by: str, reason: str
) -> list[Version]:
    marked: list[Version] = []
    standings = await run.standings()
    for version in sorted({*await run.committed(), *also}):
        concerned = version.generation == generation and version.step >= step
        if concerned and not standings.get(version, UNMARKED).unhealthy:
            await run.add_mark(version, "unhealthy", by=by, reason=reason[:REASON_CHARACTERS_MAX])
            marked.append(version)
    return marked
