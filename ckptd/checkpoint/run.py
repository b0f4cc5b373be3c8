"""A run at a backend: what exists, on which line, who may write. Everything is asked of the storage, each time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Literal

from ckptd.checkpoint import leases
from ckptd.checkpoint.concurrency import each
from ckptd.checkpoint.leases import HeldLease, writer_stem
from ckptd.checkpoint.objects import DAMAGED, place, read_record, token
from ckptd.checkpoint.selectors import NAMED_MAX, Selector, choose, named, spoken
from ckptd.checkpoint.standing import Standing, kind_of_mark, mark_order, standing
from ckptd.errors import (
    AlreadyExists,
    FormatError,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    RunInUse,
    StorageError,
    UsageError,
)
from ckptd.format import lineage, records
from ckptd.format.keys import (
    CHECKPOINTS,
    GENERATION_MAX,
    GENERATIONS,
    MANIFESTS,
    MARKS,
    RUN,
    Version,
    generation_key,
    manifest_key,
    mark_key,
    parse_version,
)
from ckptd.format.records import GenerationRecord, Manifest, Mark, Parent, encode
from ckptd.limits import LEASE_SECONDS, MANIFEST_BYTES_MAX
from ckptd.storage import Backend

RECORDS_IN_FLIGHT = 16
"""Small records that are read at once."""
NEIGHBOURS_LISTED_MAX = 2000
"""So many objects are looked at for the hint that names the runs below a place that is none."""
MarkKind = Literal["verified", "suspect", "pinned", "unpinned", "unhealthy", "revoked", "debug"]


class Run:
    """Cheap to make; keeps nothing of what it read but the run's id. Safe to use from many tasks.

    Every method raises :class:`StorageError` where the store cannot tell, and says that something does not exist only
    where the store said so.
    """

    def __init__(self, backend: Backend, run_id: str) -> None:
        self.backend = backend
        self.id = run_id

    @classmethod
    async def open(cls, backend: Backend, *, create: bool = False) -> Run:
        """The run at the backend's root; with ``create``, made where nothing is there.

        Raises :class:`NoCheckpoint` where there is no run, :class:`IntegrityError` where its checkpoints are there
        but ``run.json`` is not.
        """
        try:
            record = await read_record(backend, RUN, records.Run)
        except NotFound:
            for prefix in (MANIFESTS, GENERATIONS):
                async for info in backend.scan(prefix):
                    raise IntegrityError(
                        f"{place(backend, RUN)} is missing, yet {info.key} is there", hint="bring run.json back"
                    ) from None
            if not create:
                raise await _no_run(backend) from None
            record = await _create(backend)
        return cls(backend, record.run)

    # Generations

    async def generation_numbers(self) -> list[int]:
        """Of all generations that were opened, ascending."""
        names = [_name(info.key, GENERATIONS) async for info in self.backend.scan(GENERATIONS)]
        return sorted(int(name) for name in names if name.isdecimal())

    async def generation(self, number: int) -> GenerationRecord:
        """Raises :class:`NotFound`, :class:`FormatError`, and :class:`IntegrityError` for another run's record."""
        record = await read_record(self.backend, generation_key(number), GenerationRecord)
        if (record.run, record.generation) != (self.id, number):
            raise IntegrityError(
                f"{place(self.backend, generation_key(number))} is of run {record.run}, generation {record.generation}",
                hint=DAMAGED,
            )
        return record

    async def generations(self) -> list[GenerationRecord]:
        """All of them, by number."""
        return await each(await self.generation_numbers(), RECORDS_IN_FLIGHT, self.generation)

    async def open_generation(
        self, *, launch: str, world: int, opened_from: Version | None, host: str, pid: int
    ) -> GenerationRecord:
        """Begin the next life of the run; exactly one caller gets each number. Durable on return."""
        parent = None if opened_from is None else Parent(generation=opened_from.generation, step=opened_from.step)
        number = max(await self.generation_numbers(), default=0) + 1
        while number <= GENERATION_MAX:
            record = GenerationRecord(
                generation=number, host=host, launch=launch, opened_from=parent, pid=pid, run=self.id, world=world
            )
            try:
                await self.backend.put(generation_key(number), encode(record), if_absent=True)
                return record
            except AlreadyExists:
                number += 1  # somebody else's; a number that is skipped harms nothing
        raise UsageError(f"{self.backend.url}: all {GENERATION_MAX} generations are used up")

    # Checkpoints

    async def committed(self) -> list[Version]:
        """Every committed checkpoint, by generation and step."""
        return _by_generation([info.key async for info in self.backend.scan(MANIFESTS)], MANIFESTS)

    async def incomplete(self) -> list[Version]:
        """Checkpoints of which something is stored, but no manifest: still being written, given up, or half deleted.
        Never used for anything but telling."""
        folders = {info.key.rpartition("/")[0] async for info in self.backend.scan(CHECKPOINTS)}
        committed = set(await self.committed())
        return [version for version in _by_generation(folders, CHECKPOINTS) if version not in committed]

    async def line(self, also: Iterable[Version] = ()) -> list[Version]:
        """The committed checkpoints that lead to the run's newest state, newest first.

        ``also``: what is to count as committed, such as what the daemons of all ranks hold and are about to commit.
        """
        committed = _sorted({*await self.committed(), *also})
        if not committed:
            return []
        by_generation = {version.generation: version for version in committed}
        numbers = set(await self.generation_numbers()) | by_generation.keys()
        relevant = sorted(number for number in numbers if min(by_generation) <= number <= max(by_generation))

        async def parent(number: int) -> Version | None:
            return await self._parent(number, by_generation.get(number))

        parents = await each(relevant, RECORDS_IN_FLIGHT, parent)
        return lineage.line(committed, dict(zip(relevant, parents, strict=True)))

    async def latest(self) -> Version | None:
        """The newest checkpoint on the line."""
        return next(iter(await self.line()), None)

    async def manifest(self, version: Version) -> Manifest:
        """Raises :class:`NoCheckpoint` where it is not committed, :class:`FormatError`, and :class:`IntegrityError`
        where the manifest is another checkpoint's."""
        key = manifest_key(version)
        try:
            manifest = await read_record(self.backend, key, Manifest, limit_bytes=MANIFEST_BYTES_MAX)
        except NotFound:
            raise NoCheckpoint(f"{self.backend.url}: {spoken(version)} is not committed") from None
        if (manifest.run, manifest.version) != (self.id, version):
            raise IntegrityError(
                f"{place(self.backend, key)} is the manifest of {spoken(manifest.version)} of run {manifest.run}",
                hint=DAMAGED,
            )
        return manifest

    async def resolve(self, selector: Selector) -> Version:
        """The checkpoint that a person means. A bare step is looked for on the line first.

        Raises :class:`NoCheckpoint`, naming what exists, and :class:`UsageError` for what is no selector.
        """
        line, committed = await self.line(), await self.committed()
        try:
            return choose(selector, line, committed)
        except NoCheckpoint as error:
            hint = error.hint
            if not committed and (incomplete := await self.incomplete()):
                hint = f"incomplete, and so never used: {named(incomplete)}"
            raise NoCheckpoint(f"{self.backend.url}: {error.message}", hint=hint) from None

    # Marks

    async def marks(self, version: Version) -> list[Mark]:
        """What has been said of a checkpoint, oldest first by the store's clock."""

        async def read(key: str) -> Mark:
            return await read_record(self.backend, key, Mark)

        return await each(await self._marks_below(f"{MARKS}{version}/"), RECORDS_IN_FLIGHT, read)

    async def marked(self) -> dict[Version, list[str]]:
        """The kinds of all marks of all checkpoints, oldest first by the store's clock; from one listing."""
        kinds: dict[Version, list[str]] = {}
        for key in await self._marks_below(MARKS):
            with contextlib.suppress(FormatError):
                version = parse_version(key.removeprefix(MARKS).partition("/")[0])
                kinds.setdefault(version, []).append(kind_of_mark(key))
        return kinds

    async def standings(self) -> dict[Version, Standing]:
        """Of all checkpoints that have marks."""
        return {version: standing(kinds) for version, kinds in (await self.marked()).items()}

    async def standing(self, version: Version) -> Standing:
        """Of one checkpoint; from one listing, of its own marks."""
        return standing([kind_of_mark(key) for key in await self._marks_below(f"{MARKS}{version}/")])

    async def _marks_below(self, prefix: str) -> list[str]:
        return [info.key for info in sorted([info async for info in self.backend.scan(prefix)], key=mark_order)]

    async def add_mark(self, version: Version, kind: MarkKind, *, by: str, reason: str) -> None:
        """Durable on return."""
        mark = Mark(by=by, mark=kind, reason=reason, version=str(version))
        await self.backend.put(mark_key(version, kind, token()), encode(mark))

    # Writers

    async def claim_writer(self, *, launch: str, holder: str, takeover: bool = False) -> HeldLease:
        """Claim the run for a launch; the restarts of one launcher (``launch#count``) count as one.

        ``holder``: host, process id and launch id, for the message that others get. Raises :class:`RunInUse`, naming
        the owner, while a writer of another launch lives; with ``takeover`` its claim is removed instead. Of two that
        claim at once, none may win; never both.
        """
        lease = await leases.take(self.backend, writer_stem(launch), purpose="writer", holder=holder)
        try:
            own = lease.key.split("-")[1]
            others = {
                key: found
                for key, found in (await leases.live(self.backend, "writer-")).items()
                if key.split("-")[1] != own
            }
            if others and not takeover:
                raise RunInUse(
                    f"{self.backend.url} is being written by {next(iter(others.values())).holder}",
                    hint=f"end it, or take the run away from it with takeover=True; "
                    f"its claim ends {LEASE_SECONDS:.0f} s after its death",
                )
            with contextlib.suppress(ExceptionGroup):  # they expire by themselves
                await self.backend.delete(others)
        except BaseException:
            await lease.release()
            raise
        return lease

    # Details

    async def _parent(self, generation: int, committed: Version | None) -> Version | None:
        """From which checkpoint a generation was opened, by its own record, or else by a manifest of its own."""
        try:
            parent = (await self.generation(generation)).opened_from
        except (NotFound, FormatError, IntegrityError):
            # One damaged object must not take the older checkpoints away; `verify` reports it.
            try:
                parent = None if committed is None else (await self.manifest(committed)).parent
            except (NoCheckpoint, FormatError, IntegrityError):
                parent = None
        return None if parent is None else parent.version


async def _create(backend: Backend) -> records.Run:
    record = records.Run(run=token())
    try:
        await backend.put(RUN, encode(record), if_absent=True)
    except AlreadyExists:
        return await read_record(backend, RUN, records.Run)  # another rank's, or our own after a lost answer
    return record


async def _no_run(backend: Backend) -> NoCheckpoint:
    """The error for a root without a run, naming the runs below it."""
    runs: list[str] = []
    seen = 0
    with contextlib.suppress(StorageError):  # only a hint
        async for info in backend.scan(""):
            seen += 1
            if info.key.endswith(f"/{RUN}"):
                runs.append(info.key.removesuffix(f"/{RUN}"))
            if len(runs) > NAMED_MAX or seen > NEIGHBOURS_LISTED_MAX:
                break
    hint = f"runs lie below it: {', '.join(runs[:NAMED_MAX])}" if runs else "is the URL right?"
    return NoCheckpoint(f"{backend.url} holds no run", hint=hint)


def _name(key: str, prefix: str) -> str:
    return key.removeprefix(prefix).removesuffix(".json")


def _by_generation(keys: Iterable[str], prefix: str) -> list[Version]:
    versions: list[Version] = []
    for key in keys:
        with contextlib.suppress(FormatError):  # a foreign name
            versions.append(parse_version(_name(key, prefix)))
    return _sorted(versions)


def _sorted(versions: Iterable[Version]) -> list[Version]:
    return sorted(versions, key=lambda version: (version.generation, version.step))
