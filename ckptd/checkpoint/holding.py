"""Keeping checkpoints from being deleted while somebody is about to refer to their bytes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from ckptd.checkpoint import leases
from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.objects import exists
from ckptd.checkpoint.processes import holder_here
from ckptd.checkpoint.selectors import spoken
from ckptd.errors import NoCheckpoint, StorageError, first_line
from ckptd.format.keys import Version, manifest_key, tombstone_key
from ckptd.limits import LEASE_SECONDS
from ckptd.storage import Backend, settle

log = logging.getLogger(__name__)

RENEWED_EACH_SECONDS = LEASE_SECONDS / leases.RENEWALS_PER_LEASE
HELD_AT_ONCE = 8


class Holding:
    """Leases on some checkpoints, renewed in the background until :meth:`release`."""

    def __init__(self, backend: Backend, versions: frozenset[Version]) -> None:
        self.versions = versions
        self._backend = backend
        self._leases: list[leases.HeldLease] = []
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def of(cls, backend: Backend, versions: Iterable[Version]) -> Holding:
        """Held on return, and committed.

        Raises :class:`NoCheckpoint` where one of them is not committed, or is being deleted, and :class:`StorageError`.
        """
        holding = cls(backend, frozenset(versions))
        try:
            await each(holding.versions, HELD_AT_ONCE, holding._hold)
        except BaseException:
            await holding.release()
            raise
        if holding.versions:
            holding._renewing = asyncio.create_task(holding._renew())
        return holding

    async def _hold(self, version: Version) -> None:
        # The lease first: whoever deletes announces it before looking for leases.
        holder = holder_here("which is about to refer to it")
        stem = leases.reference_stem(version)
        self._leases.append(await leases.take(self._backend, stem, purpose="reference", holder=holder, version=version))
        if await exists(self._backend, tombstone_key(version)):
            raise NoCheckpoint(f"{self._backend.url}: {spoken(version)} is being deleted")
        if not await exists(self._backend, manifest_key(version)):
            raise NoCheckpoint(f"{self._backend.url}: {spoken(version)} is not committed")
        await settle(self._backend, manifest_key(version))  # its writer may have died before that was durable

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_EACH_SECONDS)
            for lease in self._leases:
                try:
                    await lease.renew()
                except StorageError as error:
                    # Whoever commits looks again: what has gone by then fails that commit, and nothing else.
                    log.warning("%s is not renewed: %s", lease.key, first_line(error))

    async def release(self) -> None:
        """Give them back. Idempotent, and never raises for a store that fails."""
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await renewing
        held, self._leases = self._leases, []
        for lease in held:
            with contextlib.suppress(StorageError):
                await lease.release()
