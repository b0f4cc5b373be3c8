"""A run in several tiers: one id in all of them, one number for each generation, and one line over what they hold.

Each tier is a run of its own in the format. What is put into all of them is put into the furthest first: that is the
one which survives, and so the one by which two starts that race tell who was first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.leases import launch_family
from ckptd.checkpoint.objects import place, read_record, token
from ckptd.checkpoint.run import RECORDS_IN_FLIGHT, Run
from ckptd.checkpoint.standing import Standing
from ckptd.errors import (
    AlreadyExists,
    CkptdError,
    ConfigError,
    FormatError,
    NoCheckpoint,
    NotFound,
    StorageError,
    Superseded,
    Unavailable,
    UsageError,
    first_line,
)
from ckptd.format import lineage, records
from ckptd.format.keys import GENERATION_MAX, RUN, Version, generation_key
from ckptd.format.records import GenerationRecord, Parent, encode
from ckptd.limits import TIER_ANSWER_SECONDS
from ckptd.storage import Backend

log = logging.getLogger(__name__)


class TierRuns:
    """The runs in the tiers that answered, nearest first; all of one id."""

    def __init__(self, run_id: str, runs: Sequence[Run], silent: dict[str, CkptdError]) -> None:
        self.id = run_id
        self.runs = tuple(runs)
        self.silent = silent
        """URL → why that tier cannot tell what it holds."""

    async def committed(self) -> set[Version]:
        """What is committed in any of them."""
        return {version for run in self.runs for version in await run.committed()}

    async def standings(self) -> dict[Version, Standing]:
        """What the marks in all of them add up to. What is suspect in one tier may be sound in another, which says so
        when it is read."""
        found: dict[Version, list[Standing]] = {}
        for run in self.runs:
            for version, standing in (await run.standings()).items():
                found.setdefault(version, []).append(standing)
        return {
            version: Standing(
                verified=any(each.verified for each in each_tier),
                suspect=any(each.suspect for each in each_tier) and not any(each.verified for each in each_tier),
                unhealthy=any(each.unhealthy for each in each_tier),
                pinned=any(each.pinned for each in each_tier),
                debug=any(each.debug for each in each_tier),
            )
            for version, each_tier in found.items()
        }

    async def line(self, also: Iterable[Version] = ()) -> list[Version]:
        """As :meth:`Run.line`, over all tiers together."""
        versions = {*await self.committed(), *also}
        if not versions:
            return []
        newest: dict[int, Version] = {}
        for version in sorted(versions, key=lambda version: (version.generation, version.step)):
            newest[version.generation] = version
        numbers = {number for run in self.runs for number in await run.generation_numbers()} | newest.keys()
        relevant = sorted(number for number in numbers if min(newest) <= number <= max(newest))

        async def parent(number: int) -> Version | None:
            return await self._parent(number, newest.get(number))

        parents = await each(relevant, RECORDS_IN_FLIGHT, parent)
        return lineage.line(versions, dict(zip(relevant, parents, strict=True)))

    async def _parent(self, number: int, newest: Version | None) -> Version | None:
        for run in self.runs:
            with contextlib.suppress(CkptdError):  # a further tier may know, and a damaged record is no answer
                found = (await run.generation(number)).opened_from
                return None if found is None else found.version
        if newest is None:
            return None
        for run in self.runs:
            with contextlib.suppress(CkptdError):
                found = (await run.manifest(newest)).parent
                return None if found is None else found.version
        return None

    async def wherever_committed(self, version: Version, mark: Callable[[Run], Awaitable[bool]]) -> None:
        """Call ``mark``, which says whether it took, in every tier that has a checkpoint. Raises what failed last, or
        :class:`StorageError`, where it took in none."""
        marked = False
        failure: CkptdError | None = None
        for run in self.runs:
            try:
                if version in await run.committed() and await mark(run):
                    marked = True
            except CkptdError as error:
                failure = error
        if not marked:
            raise failure or StorageError(f"{version} is committed in no tier", key=self.runs[0].backend.url)

    async def latest_is_ours(self, launch: str) -> bool:
        """Whether the newest generation that is known was opened by this launch, or one of its restarts: then nobody
        else can have gone on in a tier that does not answer."""
        numbers = [(number, run) for run in self.runs for number in await run.generation_numbers()]
        if not numbers:
            return False
        number, run = max(numbers, key=lambda found: found[0])
        try:
            return launch_family((await run.generation(number)).launch) == launch_family(launch)
        except CkptdError:
            return False


async def open_tiers(backends: Sequence[Backend], *, create: bool = False) -> TierRuns:
    """The run in its tiers. With ``create``, its id is put into those that lack it; a set of tiers that somebody died
    over is completed.

    A tier that cannot tell is passed over where another one knows the run, and named in ``silent``. Raises
    :class:`NoCheckpoint` where all say that there is no run, :class:`ConfigError` where they hold different runs, and
    the nearest tier's error where none knows the run and one cannot tell.
    """
    ids, silent, absent = await _ask(backends, TIER_ANSWER_SECONDS if len(backends) > 1 else None)
    if not ids and silent:
        ids, silent, absent = await _ask(backends, None)  # nobody else can tell
    if len(set(ids.values())) > 1:
        held = ", ".join(f"{url} holds run {run_id}" for url, run_id in ids.items())
        raise ConfigError(f"the tiers are of different runs: {held}", hint="give each run roots of its own")
    if not ids and (silent or not create):
        raise next(iter([*silent.values(), *absent]))
    known, run_id = bool(ids), next(iter(ids.values()), "") or token()
    if create:
        for backend in reversed([each for each in backends if each.url not in {**ids, **silent}]):
            run_id = await put_run_id(backend, run_id, sure=known)
            ids[backend.url] = run_id
    for url, error in silent.items():
        log.warning("%s is passed over for now: %s", url, first_line(error))
    return TierRuns(run_id, [Run(backend, run_id) for backend in backends if backend.url in ids], silent)


async def _ask(
    backends: Sequence[Backend], seconds: float | None
) -> tuple[dict[str, str], dict[str, CkptdError], list[NoCheckpoint]]:
    """URL → id, URL → why it cannot tell, and what those say that hold no run."""
    ids: dict[str, str] = {}
    silent: dict[str, CkptdError] = {}
    absent: list[NoCheckpoint] = []
    for backend in backends:
        try:
            async with answering(backend.url, seconds):
                ids[backend.url] = (await Run.open(backend)).id
        except NoCheckpoint as error:
            absent.append(error)
        except CkptdError as error:
            silent[backend.url] = error
    return ids, silent, absent


@contextlib.asynccontextmanager
async def answering(url: str, seconds: float | None) -> AsyncGenerator[None]:
    """Raise :class:`Unavailable` where a tier does not answer within that time."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(f"did not answer within {seconds:g} s", key=url) from None


async def put_run_id(backend: Backend, run_id: str, *, sure: bool = True) -> str:
    """Make a root that of a run, durably. Returns its id in the end: without being ``sure``, that of whoever was first.

    Raises :class:`ConfigError` where it is another run's.
    """
    try:
        await backend.put(RUN, encode(records.Run(run=run_id)), if_absent=True)
    except AlreadyExists:
        found = (await read_record(backend, RUN, records.Run)).run
        if sure and found != run_id:
            raise ConfigError(
                f"{place(backend, RUN)} is of run {found}, and this is run {run_id}",
                hint="give each run roots of its own",
            ) from None
        return found
    return run_id


async def put_generation(backend: Backend, record: GenerationRecord) -> None:
    """Make a generation known in a tier. Raises :class:`Superseded` where its number is another launch's there."""
    try:
        await backend.put(generation_key(record.generation), encode(record), if_absent=True)
    except AlreadyExists:
        found = await read_record(backend, generation_key(record.generation), GenerationRecord)
        if found != record:
            raise Superseded(
                f"generation {record.generation} of {backend.url} is of launch {found.launch} on {found.host}",
                hint=f"launch {record.launch} could not reach this tier when it began; end one of the two",
            ) from None


async def open_generation(
    tiers: TierRuns, *, launch: str, world: int, opened_from: Version | None, host: str, pid: int
) -> GenerationRecord:
    """Begin the next life of the run in all tiers that answer; exactly one caller gets each number. Durable on return.

    A further tier that does not answer, or takes nothing, learns of it before anything of the generation is copied
    there. Raises the nearest tier's :class:`StorageError`.
    """
    parent = None if opened_from is None else Parent(generation=opened_from.generation, step=opened_from.step)
    number = 1 + max([number for run in tiers.runs for number in await run.generation_numbers()], default=0)
    while number <= GENERATION_MAX:
        record = GenerationRecord(
            generation=number, host=host, launch=launch, opened_from=parent, pid=pid, run=tiers.id, world=world
        )
        try:
            for run in reversed(tiers.runs):
                await _tell(run, record, needed=run is tiers.runs[0])
            return record
        except Superseded:
            number += 1  # somebody else's; a number that is skipped harms nothing
    raise UsageError(f"{tiers.runs[0].backend.url}: all {GENERATION_MAX} generations are used up")


async def _tell(run: Run, record: GenerationRecord, *, needed: bool) -> None:
    """Make a generation known in a tier. One that is not ``needed``, and is full or read-only, is passed over."""
    try:
        await put_generation(run.backend, record)
    except StorageError as error:
        if needed:
            raise
        log.warning("%s is passed over for now: %s", run.backend.url, first_line(error))


async def copy_identity(source: Run, target: Backend, generation: int) -> None:
    """Make a tier that may know nothing yet one of the run's, and the generation known in it. Raises what
    :func:`put_run_id` and :func:`put_generation` raise, :class:`StorageError`."""
    try:
        record = await source.generation(generation)
    except NotFound as error:
        raise StorageError(f"the record of generation {generation} is missing", key=source.backend.url) from error
    await put_run_id(target, source.id)
    await put_generation(target, record)


async def copy_health(source: Run, target: Backend, version: Version) -> None:
    """Before a checkpoint is copied: what is unhealthy in one tier is so in the next. Raises :class:`StorageError`."""
    further = Run(target, source.id)
    if not (await source.standing(version)).unhealthy:
        return
    if not (await further.standing(version)).unhealthy:
        reason = ""
        with contextlib.suppress(FormatError):  # that there is such a mark is what counts
            reasons = [mark.reason for mark in await source.marks(version) if mark.mark == "unhealthy"]
            reason = reasons[-1] if reasons else ""
        await further.add_mark(version, "unhealthy", by="copy", reason=reason)
