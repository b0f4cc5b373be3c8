"""What a preflight is told, and what it finds without torch: the host, and the store of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.cli.doctor import Wishes, check_host, check_root
from ckptd.cli.doctor_command import check_url
from ckptd.cli.options import opened_backend
from ckptd.errors import CkptdError
from ckptd.health.rates import check_clock, check_rate
from ckptd.health.report import Check, check_of
from ckptd.limits import MIB

STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The same on all ranks."""

    wishes: Wishes
    url: str | None = None
    """The run whose store is tried; ``None``: none is."""
    storage_options: tuple[str, ...] = ()
    """``KEY=VALUE``."""
    single: bool = False
    """This process alone, whatever the launcher says."""
    probe_bytes: int = 64 * MIB
    traffic_bytes: int = 32 * MIB
    """In each of a few transfers between two ranks."""
    gpu_memory_fraction: float = 0.8
    """Of what is free of each GPU's memory, filled with patterns."""
    roll_call_seconds: float = 120.0
    """How long all ranks are waited for at the beginning."""
    checks_seconds: float = 300.0
    """How long a rank may take for what it tries by itself."""
    pair_seconds: float = 30.0
    """How long two ranks may take to reach each other and send."""


def host_checks(options: Options) -> Iterator[Check]:
    """This machine and the store, as one rank of each node tries them."""
    for finding in check_host(options.wishes):
        yield check_of(finding)
    if options.url is not None:
        yield from asyncio.run(_store_checks(options.url, options))


async def _store_checks(url: str, options: Options) -> list[Check]:
    option = list(options.storage_options)
    try:
        checks = [check_of(finding, shared=True) for finding in await check_url(url, option, options.wishes)]
        there, _ = check_root(url)  # a trial makes no folder for the run
        if there is None:
            return checks
        async with opened_backend(there, option) as backend:
            checks += [await check_clock(backend), await check_rate(backend, options.probe_bytes)]
        return [Check(level="ok", subject=STORE, message=f"{backend.url} can be used from here", shared=True), *checks]
    except CkptdError as error:
        return [Check(level="error", subject=STORE, message=error.message, hint=error.hint, shared=True)]
