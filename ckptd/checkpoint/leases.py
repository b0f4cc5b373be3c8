"""Leases: claims that expire by the store's clock. A holder renews under a new name, as nothing is ever overwritten."""

from __future__ import annotations

import contextlib
import time
from typing import Literal

from ckptd.checkpoint.objects import damaged, place, read_record, store_clock, token
from ckptd.checkpoint.processes import is_gone, own_identity
from ckptd.errors import NotFound
from ckptd.format.digests import hex_digest
from ckptd.format.keys import LEASES, Version
from ckptd.format.records import Lease, encode
from ckptd.limits import LEASE_SECONDS
from ckptd.storage import Backend

RENEWALS_PER_LEASE = 3
"""So many chances to renew before others take the holder for dead."""


def launch_family(launch: str) -> str:
    """The launch id without its restart count: what one launcher's restarts have in common."""
    return launch.rsplit("#", 1)[0]


def writer_stem(launch: str) -> str:
    """How the leases of a launch family start."""
    return f"writer-{hex_digest(launch_family(launch).encode())}-"


def reader_stem(version: Version) -> str:
    """How the leases of a checkpoint's readers start."""
    return f"reader-{version}-"


def reference_stem(version: Version) -> str:
    """How the leases start of those who are about to refer to a checkpoint's bytes."""
    return f"reference-{version}-"


class HeldLease:
    """A lease of this process's own. To be renewed at least every :data:`LEASE_SECONDS`, and released."""

    def __init__(self, backend: Backend, stem: str, record: Lease) -> None:
        self._backend = backend
        self._stem = f"{LEASES}{stem}{token()}"
        self._data = encode(record)
        self._renewals = 0
        self._renewed_seconds = 0.0

    @property
    def key(self) -> str:
        """The object that is the lease now."""
        return self._name(self._renewals)

    def _name(self, renewals: int) -> str:
        return f"{self._stem}-{renewals:06d}.json"

    async def put(self) -> None:
        """Make it known. Raises :class:`StorageError`."""
        self._renewed_seconds = time.monotonic()
        await self._backend.put(self.key, self._data)

    async def renew(self) -> None:
        """Hold it for another :data:`LEASE_SECONDS`. Raises :class:`StorageError`."""
        before_last = self._name(self._renewals - 1)
        self._renewals += 1
        await self.put()
        # The last name stays until the next renewal, so that whoever has just listed it can still read it.
        with contextlib.suppress(ExceptionGroup):  # it expires by itself
            await self._backend.delete([before_last] if self._renewals > 1 else [])

    async def keep(self) -> None:
        """Renew where it is time to: cheap, for loops that read or write for long."""
        if time.monotonic() - self._renewed_seconds > LEASE_SECONDS / RENEWALS_PER_LEASE:
            await self.renew()

    async def release(self) -> None:
        """Give it up. Never raises for a store that fails, as it then expires by itself."""
        with contextlib.suppress(ExceptionGroup):
            await self._backend.delete([self._name(number) for number in range(self._renewals + 1)[-2:]])


async def take(
    backend: Backend,
    stem: str,
    *,
    purpose: Literal["writer", "reader", "reference"],
    holder: str,
    version: Version | None = None,
) -> HeldLease:
    """A new lease, known to others on return. Raises :class:`StorageError`."""
    record = Lease(
        holder=holder,
        process=own_identity(),
        purpose=purpose,
        version=None if version is None else str(version),
    )
    lease = HeldLease(backend, stem, record)
    await lease.put()
    return lease


async def live(backend: Backend, *stems: str) -> dict[str, Lease]:
    """Key → lease, of those whose name starts with one of ``stems`` and that hold now. Sweeps expired ones of any kind.

    Needs to write, as it asks the store for the time. Raises :class:`FormatError` and :class:`IntegrityError`, naming
    it, for one that cannot be read or is another's: until it expires, somebody may hold what it is on.
    """
    found = {info.key: info.modified_seconds async for info in backend.scan(LEASES)}
    if not found:
        return {}
    now = await store_clock(backend)
    expired = [key for key, modified in found.items() if now - modified > LEASE_SECONDS]
    leases: dict[str, Lease] = {}
    for key in sorted(found.keys() - set(expired)):
        if not key.removeprefix(LEASES).startswith(stems):
            continue
        try:
            lease = await read_record(backend, key, Lease)
        except NotFound:
            continue  # released or renewed meanwhile
        if not key.removeprefix(LEASES).startswith(f"{lease.purpose}-{lease.version or ''}"):
            raise damaged(place(backend, key), f"is the lease of a {lease.purpose}, on {lease.version or 'the run'}")
        if is_gone(lease.process):
            expired.append(key)
        else:
            leases[key] = lease
    with contextlib.suppress(ExceptionGroup):
        await backend.delete(expired)
    return leases
