"""Opening a generation: the number under which this start writes, and the claim that it is the only writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.errors import CkptdError, UsageError
from ckptd.format.keys import Version
from ckptd.format.records import Parent
from ckptd.limits import LEASE_SECONDS
from ckptd_client.agreement import Agreement
from ckptd_client.roots import Root

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
    """Rank 0's claim on the run: held by a thread that renews it, and expiring by itself where the process dies."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._released: asyncio.Event | None = None

    def open(self, opening: Opening) -> tuple[str, int]:
        """The run's id and the number of the new generation.

        Raises :class:`ckptd.errors.RunInUse` while another writer lives, and :class:`UsageError` for a start from
        nothing where the run has checkpoints, unless that was asked for.
        """
        opened: Future[tuple[str, int]] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._hold(opening, opened),), name="ckptd-claim", daemon=True
        )
        self._thread.start()
        return opened.result()

    async def _hold(self, opening: Opening, opened: Future[tuple[str, int]]) -> None:
        self._loop, self._released = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with self._root.visit() as backend:
                run = await Run.open(backend, create=True)
                await self._check_empty(run, opening)
                lease = await run.claim_writer(
                    launch=opening.launch, holder=self._root.holder, takeover=opening.takeover
                )
                try:
                    record = await run.open_generation(
                        launch=opening.launch,
                        world=opening.world,
                        opened_from=opening.opened_from,
                        host=socket.gethostname(),
                        pid=os.getpid(),
                    )
                    opened.set_result((run.id, record.generation))
                    while not await _set_within(self._released, RENEW_SECONDS):
                        try:
                            await lease.renew()
                        except CkptdError as error:
                            _log.warning("the claim on %s could not be renewed: %s", self._root.url, error)
                finally:
                    await lease.release()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _check_empty(self, run: Run, opening: Opening) -> None:
        if opening.opened_from is not None or opening.fresh:
            return
        latest = await run.latest()
        if latest is not None:
            raise UsageError(
                f"{self._root.url} already holds checkpoints, up to {spoken(latest)}",
                hint="call ckpt.restore() before the first step, or ckpt.restore(step=0) to start over beside them",
            )

    def close(self) -> None:
        """Give the claim up; it expires by itself where the store does not answer."""
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


def open_life(agreement: Agreement, claim: WriterClaim, opening: Opening) -> Life:
    """Open the next generation, on rank 0, and tell all ranks. Put if absent: the number is the fencing token."""

    def decide(_: list[Any]) -> list[Any]:
        return list(claim.open(opening))

    run, generation = agreement.decide("generation", None, decide)
    start = opening.opened_from
    parent = None if start is None else Parent(generation=start.generation, step=start.step)
    return Life(str(run), int(generation), opening.launch, parent)
