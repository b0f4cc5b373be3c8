"""The way of one save: from a slot to durable, and on to committed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckptd.arena import SlotState
from ckptd.checkpoint.concurrency import in_thread
from ckptd.daemon.arenas import Arenas
from ckptd.daemon.bases import Base, Bases, refer, still_likely
from ckptd.daemon.commits import Commits
from ckptd.daemon.owner import Owner
from ckptd.daemon.replication import Replication
from ckptd.daemon.save import Save, Tally
from ckptd.daemon.source import SlotSource
from ckptd.daemon.tier import Checkpoint
from ckptd.daemon.upload import Contents, existing_receipt, read_contents, upload
from ckptd.errors import CkptdError, SaveError, SnapshotVoided, StorageFull, Superseded, first_line, to_fields
from ckptd.format.keys import Version
from ckptd.format.records import Reference
from ckptd.wire.messages import Committed, Durable, Failed, SlotRef

log = logging.getLogger(__name__)

MESSAGE_TEXT_MAX = 4000
"""Characters of an error in a message."""


class Pipeline:
    """Runs saves. Those of one arena are written one after the other, in the order in which they came."""

    def __init__(
        self,
        commits: Commits,
        replication: Replication,
        tally: Tally,
        lost: Callable[[str, str, Version, int], str | None],
        arenas: Arenas,
        bases: Bases,
        threads: int,
    ) -> None:
        """``lost``: run, launch, version and rank → why its receipt cannot come any more. ``threads``: that digest."""
        self._commits = commits
        self._replication = replication
        self._tally = tally
        self._lost = lost
        self._arenas = arenas
        self._bases = bases
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ckptd-digest")

    def close(self) -> None:
        """End the threads; no save may be running."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def run(self, save: Save) -> None:
        """Never raises: the outcome is an event to whoever owns the arena by then, and in the tally."""
        try:
            await self._run(save)
        finally:
            await save.referred.release()

    async def _run(self, save: Save) -> None:
        try:
            commit = await self._make_durable(save)
            save.stage = "commit"
            began = time.monotonic()
            await asyncio.shield(commit)
        except Exception as error:
            await self._fail(save, error)
            return
        if save.durable is not None and save.owner.incremental:
            self._bases.committed(save.owner.seat.url, *save.durable, likely=save.likely)
        self._tally.counts["committed"] += 1
        self._tally.seconds["commit"] += time.monotonic() - began
        self._tally.committed[save.owner.seat.url] = save.version
        self._tally.committed_unix_seconds[save.owner.seat.url] = time.time()
        if not save.owner.dead:
            self._arenas.drop_abandoned(save.owner)
        self._replication.committed(save.owner, save.owner.nearest, save.run, save.version)
        save.fill.held.owner.post(
            Committed(
                step=save.version.step,
                generation=save.version.generation,
                stats={"commit_seconds": time.monotonic() - began},
            )
        )

    async def _make_durable(self, save: Save) -> asyncio.Task[None]:
        """Returns the commit that the durable shard has joined."""
        fill, held = save.fill, save.fill.held
        held.saves += 1
        try:
            async with held.lane:
                contents = await in_thread(read_contents, fill, save.owner)
                began = time.monotonic()
                path_taken, commit = await self._store(save, contents)
        finally:
            held.saves -= 1
            self._arenas.sweep()
        fill.settle(SlotState.DURABLE)
        self._tally.counts["durable"] += 1
        self._tally.bytes += fill.record.shard_bytes
        self._tally.seconds["queue"] += began - save.began_seconds
        self._tally.seconds["write"] += time.monotonic() - began
        stats: dict[str, float | str] = {
            "queue_seconds": began - save.began_seconds,
            "write_seconds": time.monotonic() - began,
            "bytes": fill.record.shard_bytes,
            "referenced_bytes": save.referred.bytes,
            "path": path_taken,
        }
        at = SlotRef(arena=held.arena.id, slot=fill.slot, ticket=fill.record.ticket)
        held.owner.post(Durable(at=at, stats=stats))
        return commit

    async def _store(self, save: Save, contents: Contents) -> tuple[str, asyncio.Task[None]]:
        """To the nearest tier; its commit begins as soon as the receipt is durable."""
        snapshot, tier, path_taken = contents.snapshot, save.owner.nearest, ""
        save.stage, save.run = "write", snapshot.run
        save.source = source = SlotSource(save.fill, contents.blocks, self._threads)
        try:
            receipt = await existing_receipt(tier.backend, contents) if save.adopted else None
            if receipt is None:
                if save.resumed:
                    raise SaveError(f"the receipt of {snapshot.version} is no longer at {tier.backend.url}")
                base = await self._bases.find(tier.backend, snapshot) if save.owner.incremental else None
                refer = partial(self._refer, save, contents, source, base)
                uploaded = await upload(tier.backend, contents, source, save.owner, refer)
                receipt, path_taken = uploaded.receipt, uploaded.path_taken
                if base is not None:
                    save.likely = await still_likely(base, save.referred, contents.described(source.blocks))
            save.durable = snapshot, receipt
        finally:
            await source.release()
        exchange = save.owner.exchange(tier)
        commit = self._commits.join(
            Checkpoint(tier.backend, snapshot.version, snapshot.world, snapshot.run, exchange),
            {snapshot.rank: receipt},
            partial(self._lost, save.owner.seat.url, snapshot.launch, snapshot.version),
            resumed=save.adopted,
        )
        return path_taken, commit

    async def _refer(
        self, save: Save, contents: Contents, source: SlotSource, base: Base | None
    ) -> Sequence[Reference]:
        """What need not be stored again. Where that is unlikely, writing does not wait for it."""
        if base is not None and base.likely:
            await source.digested()
            save.referred = await refer(save.owner.nearest.backend, base, contents.described(source.blocks))
            self._tally.counts["referenced_bytes"] += save.referred.bytes
        return save.referred.references

    async def _fail(self, save: Save, error: Exception) -> None:
        fill, owner, stage = save.fill, save.fill.held.owner, save.stage
        log_as = logging.INFO if isinstance(error, SnapshotVoided) or save.resumed else logging.ERROR
        log.log(log_as, "save of %s of %s failed (%s): %s", save.version, owner.seat, stage, first_line(error))
        if not isinstance(error, CkptdError):
            log.error("unexpected", exc_info=error)
        if not save.resumed:
            self._tally.counts["failed"] += 1
            self._tally.failed(save.owner.seat, save.version, stage, first_line(error))
        await fill.ended()  # until then the slot is the trainer's
        fill.settle(SlotState.FREE)
        owner.post(
            Failed(
                step=save.version.step,
                generation=save.version.generation,
                stage=stage,
                **{name: text[:MESSAGE_TEXT_MAX] for name, text in to_fields(error).items()},
            )
        )
        if isinstance(error, StorageFull) and save.run:
            # What could not be deleted while the store was full is in the way of all that follows.
            self._replication.retiring.soon(owner, owner.nearest, save.run, save.version)
        if not save.stored and not save.resumed and not isinstance(error, Superseded):
            await self.skip(save.owner, save.version, save.run, first_line(error))

    async def skip(self, owner: Owner, version: Version, run: str, reason: str) -> None:
        """Let the other ranks know that this one takes no part. ``run``: its id, empty where it is not known."""
        tier = owner.nearest
        checkpoint = Checkpoint(tier.backend, version, owner.world, run, owner.exchange(tier))
        await self._commits.skip(checkpoint, owner.seat.rank, reason)
