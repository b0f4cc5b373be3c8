"""How fast a store is from here, and whether it gives back what it was given."""

from __future__ import annotations

import os
import time

from ckptd.checkpoint.objects import store_clock, token
from ckptd.errors import CkptdError
from ckptd.format.keys import LEASES
from ckptd.health.report import Check
from ckptd.limits import LEASE_SECONDS, MIB
from ckptd.storage import Backend, Level

SUBJECT = "store rate"
CLOCK = "clock against the store"
SKEW_WARNING_SECONDS = 5.0
"""File systems keep coarse times, and some stores whole seconds."""


async def check_rate(backend: Backend, probe_bytes: int) -> Check:
    """Put one object of so many bytes, and read it again. Leaves nothing behind."""
    key = f"{LEASES}preflight-{token()}.bin"
    pattern = os.urandom(min(probe_bytes, MIB))  # a store that compresses or finds duplicates is not to look fast
    data = memoryview((pattern * (probe_bytes // len(pattern) + 1))[:probe_bytes])
    out = bytearray(probe_bytes)
    try:
        began = time.perf_counter()
        await backend.put(key, data)
        written = time.perf_counter()
        await backend.read_into(key, memoryview(out))
        read = time.perf_counter()
    except CkptdError as error:
        return Check(level="error", subject=SUBJECT, message=error.message, hint=error.hint, shared=True)
    finally:
        await _remove(backend, key)
    if memoryview(out) != data:
        text = f"{backend.url} gives back other bytes than were put"
        return Check(level="error", subject=SUBJECT, message=text, hint="do not use this store", shared=True)
    up, down = probe_bytes / (written - began), probe_bytes / (read - written)
    return Check(
        level="ok",
        subject=SUBJECT,
        message=f"{up / MIB:.0f} MiB/s written, {down / MIB:.0f} MiB/s read, one object of {probe_bytes / MIB:.3g} MiB",
        figures={"write_bytes_per_second": up, "read_bytes_per_second": down},
        shared=True,
    )


async def _remove(backend: Backend, key: str) -> None:
    try:
        await backend.delete([key])
    except* CkptdError:
        pass  # where no more can be put, little can be deleted; what failed is said already


async def check_clock(backend: Backend) -> Check:
    """This machine's clock against the times that the store gives its objects."""
    before = time.time()
    try:
        there = await store_clock(backend)
    except CkptdError as error:
        return Check(level="error", subject=CLOCK, message=error.message, hint=error.hint, shared=True)
    skew = max(there - time.time(), 0.0) or min(there - before, 0.0)
    level: Level = "error" if abs(skew) > LEASE_SECONDS else "warning" if abs(skew) > SKEW_WARNING_SECONDS else "ok"
    return Check(
        level=level,
        subject=CLOCK,
        message=f"the store's clock differs by {skew:+.1f} s",
        hint="" if level == "ok" else "set this machine's clock, by NTP",
        figures={"skew_seconds": skew},
        shared=True,
    )
