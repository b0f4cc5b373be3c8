"""Whether a save may still write at a root: it is the root of the save's own run, and no newer generation has it."""

from __future__ import annotations

import logging

from ckptd.checkpoint.objects import place, read_record
from ckptd.daemon.owner import Owner
from ckptd.errors import FormatError, NotFound, SaveError, StorageError, Superseded, first_line
from ckptd.format.keys import RUN, generation_key
from ckptd.format.records import GenerationRecord, Run, Snapshot
from ckptd.storage import Backend

log = logging.getLogger(__name__)


async def check_run(backend: Backend, run: str) -> None:
    """Raise :class:`SaveError` unless the run at the root is ``run``: what would be written anywhere else could never
    be restored, however well it is stored."""
    try:
        found = await read_record(backend, RUN, Run)
    except NotFound:
        raise SaveError(
            f"{place(backend, RUN)} is missing: the root of run {run} was deleted, moved or unmounted",
            hint="mount it or bring it back with its run.json, and saves go on; or start the training anew elsewhere",
        ) from None
    if found.run != run:
        raise SaveError(
            f"{place(backend, RUN)} is of run {found.run}, and this save is of run {run}",
            hint="bring the run's own root back, and saves go on; or start the training anew at a root of its own",
        )


async def check_generation(backend: Backend, snapshot: Snapshot, owner: Owner) -> None:
    """Raise :class:`Superseded`, naming the owner, where a newer generation was opened while this trainer goes on.

    What a trainer has left behind is finished all the same: it harms nobody, as the lineage decides what counts.
    """
    if owner.dead or not owner.connected:
        return
    key = generation_key(snapshot.generation + 1)
    try:
        newer = await read_record(backend, key, GenerationRecord)
    except NotFound:
        return
    except (StorageError, FormatError) as error:
        log.warning("cannot tell whether generation %d is superseded: %s", snapshot.generation, first_line(error))
        return
    raise Superseded(
        f"generation {newer.generation} of {backend.url} was opened by launch {newer.launch} "
        f"on {newer.host}, process {newer.pid}",
        hint=f"this trainer belongs to generation {snapshot.generation}: end it, or end the other and start anew",
    )
