"""What saves are compared with: for each rank and tier the last receipt that was committed there."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptd.checkpoint.catalog import Catalog
from ckptd.checkpoint.concurrency import in_thread
from ckptd.checkpoint.holding import Holding
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.unchanged import Described, unchanged
from ckptd.errors import CkptdError, IntegrityError, first_line
from ckptd.format.keys import Version
from ckptd.format.records import Reference, Snapshot
from ckptd.format.references import holder_of
from ckptd.limits import BASES_KEPT_BYTES
from ckptd.storage import Backend

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Base:
    """A rank's last committed receipt in one tier."""

    run: str
    generation: int
    """Whose saves are compared with it."""
    version: Version | None
    """``None``: there is no checkpoint to compare with."""
    receipt: bytes = b""
    likely: bool = True
    """Something may well be unchanged: then it is worth looking before anything is written."""


@dataclass(frozen=True, slots=True)
class Referred:
    """What a save refers to; the checkpoints are held until :meth:`release`."""

    references: tuple[Reference, ...] = ()
    holding: Holding | None = field(default=None, repr=False)

    @property
    def bytes(self) -> int:
        """Of the pieces that are not stored."""
        return sum(extent.bytes for reference in self.references for extent in reference.extents)

    async def release(self) -> None:
        """Once the save is committed or has failed. Idempotent."""
        if self.holding is not None:
            await self.holding.release()


class Bases:
    """Of all ranks that this daemon serves. What is forgotten is looked up again in storage.

    Nothing here fails a save: where something cannot be told, all of it is stored.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], Base] = OrderedDict()

    async def find(self, backend: Backend, snapshot: Snapshot) -> Base | None:
        """What a save at this root is to be compared with: the last commit of its generation, or what that was opened
        from."""
        key = backend.url, snapshot.rank
        base = self._kept.get(key)
        if base is None or (base.run, base.generation) != (snapshot.run, snapshot.generation):
            base = Base(snapshot.run, snapshot.generation, None)
            try:
                base.version, base.receipt = await _look_up(Run(backend, snapshot.run), snapshot)
            except CkptdError as error:
                log.warning("%s: nothing to compare a save with: %s", backend.url, first_line(error))
            self._keep(key, base)
        return None if base.version is None else base

    def committed(self, url: str, snapshot: Snapshot, receipt: bytes, *, likely: bool) -> None:
        """A receipt has been committed: the next save of this rank is compared with it."""
        self._keep(
            (url, snapshot.rank), Base(snapshot.run, snapshot.generation, snapshot.version, receipt, likely=likely)
        )

    def _keep(self, key: tuple[str, int], base: Base) -> None:
        self._kept[key] = base
        self._kept.move_to_end(key)
        size_bytes = sum(len(kept.receipt) for kept in self._kept.values())
        while size_bytes > BASES_KEPT_BYTES and len(self._kept) > 1:
            size_bytes -= len(self._kept.popitem(last=False)[1].receipt)


async def _look_up(run: Run, snapshot: Snapshot) -> tuple[Version | None, bytes]:
    committed = await run.committed()
    earlier = [v for v in committed if v.generation == snapshot.generation and v.step < snapshot.step]
    parent = None if snapshot.parent is None else snapshot.parent.version
    version = earlier[-1] if earlier else parent if parent in committed else None
    if version is None:
        return None, b""
    manifest = await run.manifest(version)
    if snapshot.rank >= manifest.world:
        return None, b""
    return version, await Catalog(run.backend, manifest).receipt_bytes(snapshot.rank)


async def refer(backend: Backend, base: Base, state: Described) -> Referred:
    """What a save may refer to instead of storing it, held; nothing where that cannot be told. Writes leases, so the
    root has to be known as that of the run."""
    try:
        references = await in_thread(unchanged, base.receipt, state)
        if references and (suspect := await _suspect(Run(backend, base.run), base, references)):
            references = await in_thread(unchanged, base.receipt, state, suspect)
        holding = await Holding.of(backend, {holder_of(reference.key) for reference in references})
        try:
            for reference in references:
                found = await backend.head(reference.key)
                if found.size_bytes != reference.bytes:
                    raise IntegrityError(f"{reference.key} has {found.size_bytes} bytes, not {reference.bytes}")
        except BaseException:
            await holding.release()
            raise
    except CkptdError as error:
        log.warning("%s at %s is stored in full: %s", state.version, backend.url, first_line(error))
        return Referred()
    return Referred(references, holding)


async def _suspect(run: Run, base: Base, references: Sequence[Reference]) -> set[Version]:
    """Of the checkpoints that matter: the one that is compared with, and those with the bytes."""
    asked = {holder_of(reference.key) for reference in references}
    if base.version is not None:
        asked.add(base.version)
    return {version for version in sorted(asked) if (await run.standing(version)).suspect}


async def still_likely(base: Base, referred: Referred, state: Described) -> bool:
    """Whether what follows this save is worth comparing before it is written: something of this one is unchanged,
    even if it was stored again."""
    if referred.references:
        return True
    try:
        return bool(await in_thread(unchanged, base.receipt, state))
    except CkptdError:
        return False
