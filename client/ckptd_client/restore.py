"""Restore: agree on the newest checkpoint that all ranks can have, prove it, vote, and only then touch the live state.

A rank reads its own shard, from memory where the daemon still holds it, else from storage. Whatever fails to verify on
any rank sends all ranks to the next older checkpoint, and the report says why. What the store cannot tell is an error,
never "nothing".
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from ckptd.arena import Arena
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import Selector, choose, spoken
from ckptd.checkpoint.verify import check_proof
from ckptd.errors import (
    CkptdError,
    FormatError,
    IntegrityError,
    MismatchError,
    NoCheckpoint,
    NotFound,
    ShortRead,
    first_line,
    from_fields,
    to_fields,
)
from ckptd.format.cover import check_layout
from ckptd.format.digests import DIGEST_BYTES, digest_blocks
from ckptd.format.keys import Version, parse_version, receipt_key
from ckptd.format.records import Layout, Receipt, Snapshot, decode, decode_layout
from ckptd.format.shard import block_bounds
from ckptd.limits import RECEIPT_BYTES_MAX
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import Prepared, Report, State
from ckptd_client.dtypes import torch_dtype
from ckptd_client.roots import Root

Source = Literal["memory", "storage", "none"]

CANDIDATES_MAX = 16
"""So many checkpoints, newest first, are tried before a restore gives up."""

_log = logging.getLogger(__name__)
_UNPROVEN = (IntegrityError, FormatError, NotFound, NoCheckpoint, ShortRead)
"""What sends a restore on to an older checkpoint. Anything else is either a mismatch with the live state, which an
older one would share, or the store not being able to tell."""


NOTHING = Report((), (), (), (), ())


@dataclass(slots=True)
class Restored:
    """What a restore did."""

    step: int = 0
    """The step that was restored; 0 where nothing was found."""
    source: Source = "none"
    generation: int = 0
    """The generation in which this start goes on; 0 until one was opened."""
    version: Version | None = None
    """The checkpoint that was restored."""
    report: Report = NOTHING
    """What was loaded, missing, unexpected, skipped and why; newer checkpoints that did not verify are notices."""
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    """The checkpoint's whole state tree as plain values, with a reference where it has a tensor."""


class MemoryOffers(Protocol):
    """Snapshots of this rank that the daemon holds."""

    def held(self) -> Mapping[Version, str]:
        """Those that are sealed or durable → the id of their run."""
        ...

    def locate(self, version: Version) -> tuple[Arena, int]:
        """The arena, mapped, and the slot. Raises :class:`ckptd.errors.DaemonError` where it is gone."""
        ...

    def await_idle(self) -> None:
        """Wait, bounded, until no save of this rank is in flight any more."""
        ...


@dataclass(slots=True)
class _Proven:
    """A checkpoint's state for this rank, verified, in memory."""

    snapshot: Snapshot
    layout: Layout
    shard: memoryview
    source: Source


class Restorer:
    """Restores one rank's state."""

    def __init__(
        self,
        state: State,
        agreement: Agreement,
        root: Root,
        offers: MemoryOffers,
        scratch: Callable[[int], memoryview | None],
    ) -> None:
        self._state = state
        self._agreement = agreement
        self._root = root
        self._offers = offers
        self._scratch = scratch
        self._in_memory: set[Version] = set()

    def restore(self, step: Selector, *, required: bool, strict: bool) -> Restored:
        """See :meth:`ckptd_client.Checkpointer.restore`."""
        candidates = self._candidates(step)
        passed_over: list[str] = []
        for text in candidates:
            version = parse_version(text)
            prepared, source, vote = self._prepare(version, strict)
            refusals = self._agreement.decide("vote", vote, _refusals)
            if not refusals:
                assert prepared is not None
                self._apply(prepared)
                if source == "storage" and self._agreement.rank == 0:
                    with contextlib.suppress(CkptdError):  # a store that is read-only to us restores all the same
                        run_blocking(self._mark_verified(version))
                report = replace(prepared.report, notices=(*passed_over, *prepared.report.notices))
                return Restored(version.step, source, 0, version, report, prepared.values)
            for refusal in refusals:
                if refusal["final"]:
                    raise from_fields(
                        refusal["error"], f"rank {refusal['rank']}: {refusal['message']}", refusal["hint"]
                    )
            reason = "; ".join(f"rank {refusal['rank']}: {refusal['message']}" for refusal in refusals[:4])
            passed_over.append(f"step {spoken(version)} was passed over: {reason}")
            _log.warning("%s", passed_over[-1])
        if candidates:
            raise IntegrityError(f"{self._root.url}: none of {len(candidates)} checkpoints verifies: {passed_over[0]}")
        if required:
            raise NoCheckpoint(
                f"{self._root.url}: there is no checkpoint", hint="restore without required=True to start anew"
            )
        return Restored()

    def _apply(self, prepared: Prepared) -> None:
        """Bring it into the live state, on all ranks or with an error on all: a rank whose objects refuse what they had
        saved, or that has no memory left, must not be left behind by the others."""
        trouble = None
        try:
            prepared.apply()
        except Exception as error:
            trouble = {"rank": self._agreement.rank, **to_fields(error)}
        failed = self._agreement.decide("applied", trouble, _refusals)
        if failed:
            first = failed[0]
            raise from_fields(
                first["error"], f"rank {first['rank']} could not apply what it read: {first['message']}", first["hint"]
            )

    # The decision

    def _candidates(self, step: Selector) -> list[str]:
        """Versions in the order in which to try them; the same on all ranks."""
        held = [[str(version), run] for version, run in self._offers.held().items()]
        in_memory = self._agreement.decide("offers", held, lambda all_held: run_blocking(self._usable(all_held)))
        self._in_memory = {parse_version(text) for text in in_memory}
        if not in_memory:
            # Somebody's snapshot is gone. What the daemons still write may become the newest checkpoint.
            self._offers.await_idle()
        versions = [parse_version(text) for text in in_memory]
        return self._agreement.decide("candidates", None, lambda _: run_blocking(self._list(step, versions)))

    async def _usable(self, held: list[list[list[str]]]) -> list[str]:
        """The snapshots that every rank holds in memory, of the run that lies at the root now."""
        async with self._root.visit() as backend:
            try:
                run = await Run.open(backend)
            except NoCheckpoint:
                return []  # what is in memory belongs to a run that was deleted
        ours = [{version for version, run_id in each if run_id == run.id} for each in held]
        return sorted(ours[0].intersection(*ours[1:]))

    async def _list(self, step: Selector, in_memory: list[Version]) -> list[str]:
        async with self._root.visit() as backend:
            try:
                run = await Run.open(backend)
            except NoCheckpoint:
                return []
            # A snapshot that all ranks hold sealed is as good as committed: its daemons are about to.
            line = await run.line(also=in_memory)
            committed = {*await run.committed(), *in_memory}
        if step == "latest":
            return [str(version) for version in line[:CANDIDATES_MAX]]
        return [str(choose(step, line, sorted(committed)))]

    def _prepare(self, version: Version, strict: bool) -> tuple[Prepared | None, Source, dict[str, Any] | None]:
        """Everything but touching the live state; and this rank's vote, ``None`` for yes."""
        try:
            proven = self._from_memory(version) if version in self._in_memory else None
            if proven is None:
                proven = run_blocking(self._from_storage(version))
            prepared = self._state.prepare(bytes(proven.snapshot.tree), proven.layout, _reader(proven), strict=strict)
            return prepared, proven.source, None
        except CkptdError as error:
            vote = {
                "rank": self._agreement.rank,
                "final": not isinstance(error, _UNPROVEN),
                **to_fields(error),
            }
            return None, "none", vote

    # The bytes

    def _from_memory(self, version: Version) -> _Proven | None:
        """The snapshot in the daemon's memory, or ``None`` where it is damaged or gone."""
        try:
            arena, number = self._offers.locate(version)
            record = arena.record(number)
            snapshot = decode(arena.doc(number, record), Snapshot)
            layout = decode_layout(snapshot.layout)
            shard = arena.slot(number)[: record.shard_bytes]
            self._check_memory(snapshot, layout, shard)
        except CkptdError as error:
            _log.warning("the snapshot of step %s in memory is not used: %s", version.step, first_line(error))
            return None
        return _Proven(snapshot, layout, shard, "memory")

    def _check_memory(self, snapshot: Snapshot, layout: Layout, shard: memoryview) -> None:
        """Hold a snapshot in memory against its receipt, where there is one already.

        A sealed snapshot whose receipt is not written yet has nothing to be held against but its seal.
        """
        key = receipt_key(snapshot.version, snapshot.rank, snapshot.world)

        async def read() -> bytes:
            async with self._root.visit() as backend:
                return await backend.get(key, limit_bytes=RECEIPT_BYTES_MAX)

        try:
            receipt = decode(run_blocking(read()), Receipt)
        except CkptdError:
            return
        pieces = check_layout(layout)
        found = digest_blocks(shard, block_bounds(layout.header_bytes, [piece.bytes for piece in pieces]))
        if found != receipt.shard.blocks:
            differing = next(
                i
                for i in range(0, len(found), DIGEST_BYTES)
                if found[i : i + DIGEST_BYTES] != receipt.shard.blocks[i : i + DIGEST_BYTES]
            )
            raise IntegrityError(f"block {differing // DIGEST_BYTES} of the snapshot in memory has changed")

    async def _from_storage(self, version: Version) -> _Proven:
        agreement = self._agreement
        async with (
            self._root.visit() as backend,
            await CheckpointReader.open(await Run.open(backend), version, holder=self._root.holder) as reader,
        ):
            if reader.manifest.world != agreement.world:
                raise MismatchError(
                    f"step {version.step} was saved by {reader.manifest.world} ranks, and there are {agreement.world}",
                    hint="restore on the same number of ranks",
                )
            if agreement.rank == 0:
                await check_proof(reader)
            found = await reader.receipt(agreement.rank)
            out = self._scratch(found.layout.shard_bytes) or _anonymous(found.layout.shard_bytes)
            await reader.read_shard(agreement.rank, out)
        return _Proven(found.snapshot, found.layout, out, "storage")

    async def _mark_verified(self, version: Version) -> None:
        """All ranks have read and verified it: retention counts it as restorable."""
        async with self._root.visit() as backend:
            run = await Run.open(backend)
            if not any(mark.mark == "verified" for mark in await run.marks(version)):
                await run.add_mark(version, "verified", by=self._root.holder, reason="restored by all ranks")


def _anonymous(size_bytes: int) -> memoryview:
    # Private, as first touches of shared memory cost half as much again.
    return memoryview(mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size_bytes]


def _reader(proven: _Proven) -> Callable[[str], torch.Tensor]:
    """Tensors over the verified bytes, by name: this rank's piece, in its saved dtype."""
    whole = torch.frombuffer(proven.shard, dtype=torch.uint8)
    entries = {entry.name: entry for entry in proven.layout.tensors}

    def read(name: str) -> torch.Tensor:
        entry = entries[name]
        dtype = torch_dtype(entry.dtype)
        piece = entry.pieces[0] if entry.pieces else None
        shape = entry.shape if piece is None or piece.box is None else piece.box.lengths
        if piece is None or piece.bytes == 0:
            return torch.empty(shape if piece is not None else (0,), dtype=dtype)
        return whole[piece.at : piece.at + piece.bytes].view(dtype).view(shape)

    return read


def _refusals(votes: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [vote for vote in votes if vote is not None]
