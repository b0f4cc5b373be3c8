"""Opening a generation: the number under which this start writes, and the claim that it is the only writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Generator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptd.checkpoint.leases import HeldLease
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.tiers import TierRuns, open_generation, open_tiers, put_generation, put_run_id
from ckptd.errors import CkptdError, StorageError, UsageError, from_fields, to_fields
from ckptd.format.keys import Version
from ckptd.format.records import GenerationRecord, Parent
from ckptd.limits import LEASE_SECONDS
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.nearest import refuse_stale
from ckptd_client.roots import Root, visit_all

RENEW_SECONDS = LEASE_SECONDS / 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Life:
    """What every snapshot of this start carries."""

    run: str
    generation: int
    launch: str
    parent: Parent | None


@dataclass(frozen=True, slots=True)
class Opening:
    """What a start wants to open: ``fresh`` begins from nothing even where the run has checkpoints, ``takeover`` takes
    the run from a live owner."""

    launch: str
    world: int
    opened_from: Version | None
    fresh: bool
    takeover: bool


class WriterClaim:
    """Rank 0's claim on the run, in all tiers that answer: held by a thread that renews it, and expiring by itself
    where the process dies."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = roots
        self._opening: Opening | None = None
        self._opened: Future[GenerationRecord] = Future()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._released: asyncio.Event | None = None

    def open(self, opening: Opening) -> GenerationRecord:
        """The new generation, opened in all tiers that answer.

        Raises :class:`ckptd.errors.RunInUse` while another writer lives, and :class:`UsageError` for a start from
        nothing where the run has checkpoints, unless that was asked for.
        """
        self._begin(opening)
        try:
            return self._opened.result()
        except BaseException:
            self._opening = None
            raise

    @contextlib.contextmanager
    def ahead(self, opening: Opening) -> Generator[None]:
        """Begin to open while something else is done, after which :meth:`open` waits for it. Where that fails, the
        claim is given up, and the generation stays empty."""
        self._begin(opening)
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _begin(self, opening: Opening) -> None:
        if opening == self._opening:
            return
        self._opening, self._opened = opening, Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._hold(opening, self._opened),), name="ckptd-claim", daemon=True
        )
        self._thread.start()

    async def _hold(self, opening: Opening, opened: Future[GenerationRecord]) -> None:
        self._loop, self._released = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with visit_all(self._roots) as backends:
                tiers = await open_tiers(backends, create=True)
                nearest = self._roots[0].url
                if nearest in tiers.silent:  # nothing could be saved there
                    raise tiers.silent[nearest]
                await self._check_empty(tiers, opening)
                leases: list[HeldLease] = []
                try:
                    await self._claim(tiers, opening, leases)
                    record = await open_generation(
                        tiers,
                        launch=opening.launch,
                        world=opening.world,
                        opened_from=opening.opened_from,
                        host=socket.gethostname(),
                        pid=os.getpid(),
                    )
                    opened.set_result(record)
                    while not await _set_within(self._released, RENEW_SECONDS):
                        for lease in leases:
                            await self._renew(lease)
                finally:
                    for lease in leases:
                        await lease.release()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _claim(self, tiers: TierRuns, opening: Opening, leases: list[HeldLease]) -> None:
        for run in tiers.runs:
            try:
                leases.append(
                    await run.claim_writer(
                        launch=opening.launch, holder=self._roots[0].holder, takeover=opening.takeover
                    )
                )
            except StorageError as error:
                if run is tiers.runs[0]:
                    raise
                _log.warning("%s could not be claimed: %s", run.backend.url, error)

    async def _renew(self, lease: HeldLease) -> None:
        try:
            await lease.renew()
        except CkptdError as error:
            _log.warning("the claim on %s could not be renewed: %s", self._roots[0].url, error)

    async def _check_empty(self, tiers: TierRuns, opening: Opening) -> None:
        if opening.opened_from is not None or opening.fresh:
            return
        latest = next(iter(await tiers.line()), None)
        if latest is not None:
            raise UsageError(
                f"{self._roots[0].url} already holds checkpoints, up to {spoken(latest)}",
                hint="call ckpt.restore() before the first step, or ckpt.restore(step=0) to start over beside them",
            )
        await refuse_stale(tiers, opening.launch)

    def close(self) -> None:
        """Give the claim up; it expires by itself where the store does not answer."""
        if self._opening is not None:
            futures.wait([self._opened], timeout=RENEW_SECONDS)
            self._opening = None
        if self._thread is not None and self._loop is not None and self._released is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._released.set)
            self._thread.join(timeout=RENEW_SECONDS)
            self._thread = None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def open_life(agreement: Agreement, roots: Sequence[Root], claim: WriterClaim, opening: Opening) -> Life:
    """Open the next generation, on rank 0, and tell all ranks. Put if absent: the number is the fencing token. Where a
    tier is a disk of each node's own, each node notes it there.

    Raises on all ranks what it raises on one.
    """
    told = agreement.decide("generation", None, lambda _: msgspec.to_builtins(claim.open(opening)))
    record = msgspec.convert(told, GenerationRecord)
    own = [root for root in roots if not root.shared]
    if own:
        trouble = None
        try:
            run_blocking(_note(own, record))
        except CkptdError as error:
            trouble = {"rank": agreement.rank, **to_fields(error)}
        agreement.decide("noted", trouble, _raise_first)
    start = opening.opened_from
    parent = None if start is None else Parent(generation=start.generation, step=start.step)
    return Life(record.run, record.generation, opening.launch, parent)


async def _note(roots: Sequence[Root], record: GenerationRecord) -> None:
    async with visit_all(roots) as backends:
        for backend in backends:
            await put_run_id(backend, record.run)
            await put_generation(backend, record)


def _raise_first(troubles: list[dict[str, Any] | None]) -> None:
    for trouble in filter(None, troubles):
        raise from_fields(trouble["error"], f"rank {trouble['rank']}: {trouble['message']}", trouble["hint"])
