"""Restoring over tiers: what there is in any of them, and each rank's way to the nearest one that has it sound."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

from ckptd.checkpoint.leases import launch_family
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import Selector, choose, spoken
from ckptd.checkpoint.tiers import TierRuns, open_tiers
from ckptd.errors import CkptdError, FormatError, IntegrityError, NoCheckpoint, NotFound, ShortRead, StorageError
from ckptd.format.keys import Version
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.roots import Root, visit_all

T = TypeVar("T")

UNPROVEN = (IntegrityError, FormatError, NotFound, NoCheckpoint, ShortRead)
"""A tier says with these that it does not have a checkpoint, or not sound. Any other :class:`StorageError` says that it
cannot tell."""

_log = logging.getLogger(__name__)


async def run_in(roots: Sequence[Root]) -> str:
    """The id of the run that lies in the tiers now; empty where there is none."""
    async with visit_all(roots) as backends:
        try:
            return (await open_tiers(backends)).id
        except NoCheckpoint:
            return ""


async def candidates(
    roots: Sequence[Root], step: Selector, in_memory: Sequence[Version], unhealthy: Collection[Version] = ()
) -> tuple[list[Version], list[str]]:
    """Versions in the order in which to try them, over all tiers that rank 0 sees: what it does not see, not all ranks
    can have; those that are marked suspect or unhealthy come last. And what is to be said of that. ``in_memory``: what
    all ranks hold sealed is as good as committed, as its daemons are about to; ``unhealthy``: of that, what is known
    not to be finite.

    Raises the error of a tier that cannot tell, unless nobody but this launch can have gone on there.
    """
    async with visit_all(roots) as backends:
        try:
            tiers = await open_tiers(backends)
        except NoCheckpoint:
            return [], []
        line = await tiers.line(also=in_memory)
        committed = {*await tiers.committed(), *in_memory}
        if not in_memory:
            await refuse_stale(tiers, roots[0].launch)
        standings = await tiers.standings()
    bad = {version: "unhealthy" for version in unhealthy}
    bad |= {v: each.against for v, each in standings.items() if not each.good}
    if step != "latest":
        chosen = choose(step, line, sorted(committed))
        return [chosen], [f"step {spoken(chosen)} is marked {bad[chosen]}"] if chosen in bad else []
    good = [version for version in line if version not in bad]
    newer = list(takewhile(lambda version: version in bad, line))
    said = [f"step {spoken(version)} was passed over: it is marked {bad[version]}" for version in newer]
    return [*good, *(version for version in line if version in bad)], said if good else []


async def has_own(roots: Sequence[Root], launch: str) -> bool:
    """Whether an earlier start of this launch has committed anything: it has got further than where it once began."""
    async with visit_all(roots) as backends:
        try:
            tiers = await open_tiers(backends)
        except NoCheckpoint:
            return False
        saved = {version.generation for version in await tiers.committed()}
        for number in sorted(saved, reverse=True):
            for run in tiers.runs:
                with contextlib.suppress(CkptdError):
                    if launch_family((await run.generation(number)).launch) == launch_family(launch):
                        return True
                    break
    return False


async def refuse_stale(tiers: TierRuns, launch: str) -> None:
    """Raise the error of a tier that does not answer, where somebody else may have gone on there meanwhile: what the
    other tiers hold may be old."""
    if not tiers.silent or await tiers.latest_is_ours(launch):
        return
    url, error = next(iter(tiers.silent.items()))
    raise type(error)(
        error.message, hint=f"{url} may hold newer checkpoints: wait until it answers, or leave this tier out"
    )


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What a rank has read, and where."""

    value: T
    root: Root
    passed_over: tuple[str, ...]
    """Nearer tiers, and why they did not do."""


def from_nearest(roots: Sequence[Root], read: Callable[[Root], T]) -> Found[T]:
    """``read`` from the nearest tier that can give it. Raises what it raised for other reasons than the tier; where no
    tier can, the error of one that cannot tell, else of one that holds damage, else the nearest one's."""
    failures: list[CkptdError] = []
    passed_over: list[str] = []
    for root in roots:
        try:
            return Found(read(root), root, tuple(passed_over))
        except (StorageError, *UNPROVEN) as error:
            failures.append(error)
            passed_over.append(f"{root.url} was passed over: {error.message}")
            if len(roots) > 1:
                _log.warning("%s", passed_over[-1])
    cannot_tell = [failure for failure in failures if not isinstance(failure, UNPROVEN)]
    damaged = [failure for failure in failures if isinstance(failure, IntegrityError | FormatError)]
    raise [*cannot_tell, *damaged, *failures][0]


def to_be_marked(agreement: Agreement, roots: Sequence[Root], read_from: Root | None) -> Root | None:
    """All ranks have read and verified a checkpoint; where all read from one tier, retention there is to count it as
    restorable. Which one this rank is to mark, or ``None``. Called on all ranks; ``read_from`` is ``None`` where it
    came from memory."""
    number = -1 if read_from is None else list(roots).index(read_from)
    numbers = [number] if len(roots) == 1 else agreement.decide("read-from", number, lambda numbers: numbers)
    if read_from is None or set(numbers) != {number} or (read_from.shared and agreement.rank != 0):
        return None
    return read_from


@contextlib.contextmanager
def mark_verified_meanwhile(root: Root | None, version: Version) -> Generator[None]:
    """Mark a checkpoint in a tier, in a thread that ends before the caller goes on. It has been verified, whatever
    comes of that."""
    if root is None:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ckptd-mark") as thread:
        marking = thread.submit(run_blocking, _mark(root, version))
        yield
    with contextlib.suppress(CkptdError):  # a store that is read-only to us restores all the same
        marking.result()


async def _mark(root: Root, version: Version) -> None:
    async with root.visit() as backend:
        run = await Run.open(backend)
        standing = await run.standing(version)
        if not standing.verified and not standing.suspect:  # what others found wrong with it, a restore does not settle
            await run.add_mark(version, "verified", by=root.holder, reason="read by all ranks for a restore")
