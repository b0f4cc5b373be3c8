"""Verifying: read a checkpoint again, all of it, and prove it anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptd.checkpoint.concurrency import ahead
from ckptd.checkpoint.objects import damaged, place
from ckptd.checkpoint.proofs import PROCESS_BYTES_MIN, prover_for
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.trial import Tried
from ckptd.errors import (
    CoverageError,
    FormatError,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    StateError,
    UnsupportedFormat,
)
from ckptd.format.cover import pieces_in_file_order
from ckptd.format.dtypes import stored_as
from ckptd.format.keys import Version, generation_key
from ckptd.format.proof import Commit
from ckptd.format.records import Layout, Manifest, ShardProof, encode
from ckptd.format.references import header_bytes, referenced_bytes
from ckptd.format.remainder import remainder
from ckptd.format.shard import read_header
from ckptd.storage import Finding

RECEIPTS_AT_ONCE = 8
"""Read ahead of the proof, and so in memory."""

OnProgress = Callable[[int, int], None]
"""Called with the bytes verified so far, and the bytes of the whole checkpoint."""

_LEVELS: dict[str, Literal["ok", "warning", "error"]] = {"good": "ok", "unknown": "warning", "bad": "error"}
_BAD = (IntegrityError, FormatError, CoverageError)
"""What makes a checkpoint bad. A store that cannot tell does not: its error is raised."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a full verification found."""

    version: Version
    findings: tuple[Finding, ...]
    """One for each rank, and for each thing that is wrong beside."""
    bytes_verified: int

    @property
    def good(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    @property
    def reason(self) -> str:
        """Why it is bad, in one line; empty where it is good."""
        return "; ".join(finding.message for finding in self.findings if finding.level == "error")

    @property
    def conclusive(self) -> bool:
        """Everything that was asked was answered."""
        return not self.good or all(finding.level != "warning" for finding in self.findings)

    def with_trial(self, tried: Tried) -> Verification:
        """As it stands after a trial as well."""
        finding = Finding(_LEVELS[tried.result], "load", tried.reason or "it was loaded in a process of its own")
        return replace(self, findings=(*self.findings, finding))


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest good checkpoint on the line, and what was passed over for it."""

    version: Version | None
    """``None``: none of them is good."""
    tried: tuple[Verification, ...]
    """Newest first; the last one is the good one where there is one."""


@dataclass(slots=True)
class _Findings:
    """Collects what is wrong, and goes on."""

    found: list[Finding] = field(default_factory=list[Finding])

    async def collect(self, subject: str, work: Awaitable[str]) -> None:
        """Await ``work``, whose result says what is well."""
        try:
            self.found.append(Finding("ok", subject, await work))
        except UnsupportedFormat:
            raise
        except _BAD as error:
            self.found.append(Finding("error", subject, error.message, error.hint))


async def verify(
    run: Run,
    version: Version,
    *,
    on_progress: OnProgress | None = None,
    holder: str | None = None,
    holds: Callable[[int], bool] = lambda rank: True,
) -> Verification:
    """Read everything of a checkpoint again: manifest, generation, receipts, index, and every byte of every shard
    against its digest; compare each shard's header with its layout; prove the coverage anew and compare the manifest
    with that proof byte for byte. Bounded memory: windows, some receipts, and what
    the proof keeps of them. ``holder``: hold a reader's lease meanwhile, see :meth:`CheckpointReader.open`. ``holds``:
    whether the shard of a rank is to be here; on a disk of a node's own that of others is not.

    Raises :class:`NoCheckpoint` where it is not committed, :class:`StorageError` where the store cannot tell, and
    :class:`UnsupportedFormat` for what a newer release wrote: that says nothing against it.
    """
    findings = _Findings()
    try:
        reader = await CheckpointReader.open(run, version, holder=holder)
    except UnsupportedFormat:
        raise
    except _BAD as error:
        return Verification(version, (Finding("error", "manifest", error.message, error.hint),), 0)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, reader.manifest.held_bytes)

    async with reader:
        await findings.collect("generation", _check_generation(run, reader.manifest))
        await findings.collect("proof", check_proof(reader))
        for rank in filter(holds, range(reader.manifest.world)):
            await findings.collect(f"rank {rank}", _check_rank(reader, rank, advance))
    return Verification(version, tuple(findings.found), done)


async def check_proof(reader: CheckpointReader) -> str:
    """Raise :class:`IntegrityError` unless the manifest and what it names are exactly what the receipts prove. Reads
    all receipts, some at a time; a few of them twice.

    The manifest has no digest of its own: this is how a change in it is found. Returns what is well, in words.
    """
    proved = await _proved(reader, early=False)
    if encode(proved.manifest) != encode(reader.manifest):
        # What the first release committed stays good.
        proved = await _proved(reader, early=True)
    if encode(proved.manifest) != encode(reader.manifest):
        raise damaged(reader.manifest_place, "differs from what its receipts prove")
    async for key, data in reader.beside():
        if proved.objects.get(key) != data:
            raise damaged(place(reader.run.backend, key), "differs from what the receipts prove")
    return f"{reader.manifest.world} receipts cover every tensor exactly once"


async def _proved(reader: CheckpointReader, *, early: bool) -> Commit:
    manifest = reader.manifest
    large = sum(ref.bytes for ref in manifest.receipts) > PROCESS_BYTES_MIN
    async with prover_for(manifest.world, early=early, large=large) as prover:
        async with aclosing(ahead(range(manifest.world), RECEIPTS_AT_ONCE, reader.receipt_bytes)) as receipts:
            async for data in receipts:
                await prover.add(data)
        while ranks := await prover.questions():
            async with aclosing(ahead(ranks, RECEIPTS_AT_ONCE, reader.receipt_bytes)) as receipts:
                again = iter(ranks)
                async for data in receipts:
                    await prover.look(next(again), data)
        return await prover.commit()


async def newest_good(run: Run, look: Callable[[Version], Awaitable[Verification]] | None = None) -> Choice:
    """The newest checkpoint on the line that verifies. One that is deleted meanwhile is passed over. ``look``: how each
    is verified, where :func:`verify` alone will not do."""
    tried: list[Verification] = []
    for version in await run.line():
        try:
            tried.append(await (verify(run, version) if look is None else look(version)))
        except NoCheckpoint as error:
            tried.append(Verification(version, (Finding("error", "manifest", error.message),), 0))
        if tried[-1].good:
            return Choice(version, tuple(tried))
    return Choice(None, tuple(tried))


async def _check_generation(run: Run, manifest: Manifest) -> str:
    where = place(run.backend, generation_key(manifest.generation))
    try:
        record = await run.generation(manifest.generation)
    except NotFound:
        raise damaged(where, "is missing") from None
    if (record.launch, record.world, record.opened_from) != (manifest.launch, manifest.world, manifest.parent):
        raise damaged(where, f"and the manifest of {spoken(manifest.version)} disagree on launch, world or parent")
    return f"opened by {record.launch} on {record.host}"


async def _check_rank(reader: CheckpointReader, rank: int, on_bytes: Callable[[int], None]) -> str:
    receipt, _, layout = await reader.receipt(rank)
    shard, mapped = receipt.shard, await reader.shard(rank)
    await reader.check_shard(rank, on_bytes=on_bytes)
    for key, size in [(shard.key, shard.bytes), *((reference.key, reference.bytes) for reference in shard.references)]:
        where = place(reader.run.backend, key)
        try:
            found = await reader.run.backend.head(key)
        except NotFound:  # deleted since it was read
            raise damaged(where, "is missing, though its receipt promises it") from None
        if found.size_bytes != size:
            raise damaged(where, f"has {found.size_bytes} bytes, and its receipt promises {size}")
    header = memoryview(bytearray(layout.header_bytes - mapped.start))
    await reader.read(rank, mapped.start, layout.header_bytes, header)
    if read_header(header) != _header_of(layout, shard):
        where = place(reader.run.backend, shard.key)
        raise damaged(where, "has a safetensors header that is not what its receipt says")
    elsewhere = referenced_bytes(shard)
    of_others = f", and {elsewhere} in other checkpoints" if elsewhere else ""
    return f"{shard.bytes} bytes{of_others}, {len(pieces_in_file_order(layout))} pieces"


def _header_of(layout: Layout, shard: ShardProof) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """What the header of a shard with this layout says; see :func:`ckptd.format.shard.read_header`."""
    try:
        left = remainder(layout, shard.references)
    except StateError as error:
        raise CoverageError(error.message) from None
    longer = header_bytes(layout, shard) - len(left.header)
    return {
        stored.name: (*stored_as(stored.dtype, stored.shape), at + longer, at + longer + piece.bytes)
        for (piece, stored), at in zip(left.pieces, left.offsets, strict=True)
    }
