"""How checkpoints go that are not to be kept. One actor: rank 0's daemon of the newest generation (promise P9)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptd.checkpoint import leases
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.survey import Found, Held, Known, Survey, order
from ckptd.errors import (
    AlreadyExists,
    FormatError,
    IntegrityError,
    NotFound,
    StorageError,
    Superseded,
    first_line,
    first_of,
)
from ckptd.format.keys import MARKS, Version, checkpoint_prefix, manifest_key, parse_version, tombstone_key
from ckptd.format.records import Tombstone, encode
from ckptd.limits import RETENTION_GRACE_SECONDS, TOMBSTONE_SECONDS
from ckptd.storage import settle

DELETED_AT_ONCE_MAX = 1000
"""Objects in one call; what the stores take."""
ASKED_ANEW_EVERY = 8
"""So many checkpoints go before everything is asked anew."""


@dataclass(slots=True)
class Outcome:
    """What a pass of retention did."""

    kept: int = 0
    deleted: list[Version] = field(default_factory=list[Version])
    """Orphans among them."""
    waiting: dict[Version, str] = field(default_factory=dict[Version, str])
    """Announced, but somebody reads it or needs bytes of it: the next pass tries again."""
    failed: dict[Version, str] = field(default_factory=dict[Version, str])
    """The store refused or did not answer: the next pass tries again."""


async def apply(
    run: Run,
    keep: Keep,
    *,
    generation: int,
    held: Held | None = None,
    known: Known | None = None,
    grace_seconds: float = RETENTION_GRACE_SECONDS,
) -> Outcome:
    """One pass, to be made after a commit: finish what an earlier pass left half deleted, then delete what the plan
    says, and orphans.

    Each deletion is announced by a tombstone. After ``grace_seconds``, and again for each few of them, everything is
    asked anew: the plan still says so, ``generation`` is still the newest, nobody holds a lease. What refers to others
    goes before them. The manifest goes first, so that the checkpoint ceases to exist at one moment; then its data and
    marks; the tombstone after :data:`TOMBSTONE_SECONDS`. Failures are collected, never raised, but for
    :class:`Superseded`, and :class:`StorageError` where not even the plan can be made.
    """
    this = _Pass(Survey(run, keep, held, known), generation)
    found = await this.survey.look()
    this.outcome.kept = len(found.plan.keep)
    due = await this.announce(found)
    if due:
        await asyncio.sleep(grace_seconds)
    for start in range(0, len(due), ASKED_ANEW_EVERY):
        await this.delete(due[start : start + ASKED_ANEW_EVERY])
    await this.forget(found)
    return this.outcome


class _Pass:
    def __init__(self, survey: Survey, generation: int) -> None:
        self.survey = survey
        self.outcome = Outcome()
        self._generation = generation
        self._run = survey.run

    async def announce(self, found: Found) -> list[Version]:
        """Returns what is due to go, oldest first; but before all what refers to others, newest first."""
        reasons = {**found.orphans, **found.plan.delete}
        half_deleted = found.announced.keys() & (found.uncommitted.keys() | found.marked) - found.committed
        no_longer = found.announced.keys() & found.plan.keep.keys()
        due = sorted({*reasons, *half_deleted, *no_longer}, key=order)
        due = [v for v in reversed(due) if v in found.references] + [v for v in due if v not in found.references]
        if due:
            await self._check_actor()
        # Whoever puts a manifest does not refer to what is announced: that would fail the save that is under way.
        new = [version for version in due if version in reasons and version not in found.announced]
        try:
            held = await self._leased(new, leases.reference_stem)
        except (StorageError, FormatError, IntegrityError, ExceptionGroup) as error:
            self.outcome.failed.update(dict.fromkeys(new, first_line(first_of(error))))
            return [version for version in due if version not in new]
        self.outcome.waiting.update({version: f"{spoken(version)} is held by {who}" for version, who in held.items()})
        due = [version for version in due if version not in held]
        for version in [version for version in new if version not in held]:
            tombstone = Tombstone(reason=reasons[version], version=str(version))
            try:
                with contextlib.suppress(AlreadyExists):  # announced meanwhile, or by a put whose answer was lost
                    await self._run.backend.put(tombstone_key(version), encode(tombstone), if_absent=True)
            except StorageError as error:
                self.outcome.failed[version] = first_line(error)
                due.remove(version)
        return due

    async def delete(self, batch: Sequence[Version]) -> None:
        """Of what was announced, what is still to go."""
        await self._check_actor()
        try:
            # Announced first and asked afterwards, while who reads or refers takes a lease first and looks for the
            # tombstone afterwards: one of the two sees the other. And whoever gives a lease to a reference back has
            # put the manifest before, so leases are asked for before manifests are.
            users = await self._leased(batch, leases.reader_stem, leases.reference_stem)
            found = await self.survey.look()
        except (StorageError, FormatError, IntegrityError, ExceptionGroup) as error:
            self.outcome.failed.update(dict.fromkeys(batch, first_line(first_of(error))))
            return
        for version in batch:
            try:
                if version not in found.committed:
                    await self._delete_data(version)
                    self.outcome.deleted.append(version)
                elif version not in found.plan.delete and await self._is_whole(version):
                    await self._delete([tombstone_key(version)])  # no longer to go: pinned meanwhile, say
                elif version in users:
                    self.outcome.waiting[version] = f"{spoken(version)} is read by {users[version]}"
                elif (user := self._needed_by(version, found)) is not None:
                    self.outcome.waiting[version] = f"{spoken(user)} needs bytes of it, and is still there"
                else:
                    await self._delete_committed(version)
            except (StorageError, FormatError, IntegrityError, ExceptionGroup) as error:
                self.outcome.failed[version] = first_line(first_of(error))

    async def _check_actor(self) -> None:
        newest = max(await self._run.generation_numbers(), default=self._generation)
        if newest != self._generation:
            raise Superseded(
                f"{self._run.backend.url}: generation {newest} exists, so generation {self._generation} deletes "
                "nothing more"
            )

    async def _leased(self, versions: Sequence[Version], *stems: Callable[[Version], str]) -> dict[Version, str]:
        """On which of them somebody holds a lease, and who."""
        wanted = [stem(version) for version in versions for stem in stems]
        found = (await leases.live(self._run.backend, *wanted)).values() if wanted else ()
        return {parse_version(lease.version): lease.holder for lease in found if lease.version is not None}

    def _needed_by(self, version: Version, found: Found) -> Version | None:
        """A checkpoint that refers to this one's bytes, and has not gone itself."""
        there = found.committed.difference(self.outcome.deleted)
        return next((user for user, needed in found.references.items() if version in needed and user in there), None)

    async def _delete_committed(self, version: Version) -> None:
        await self._delete([manifest_key(version)])
        await self._delete_data(version)
        self.outcome.deleted.append(version)

    async def _is_whole(self, version: Version) -> bool:
        """Whether the receipts are there. Where not, the manifest was put by somebody who was late for the deletion."""
        manifest = await self._run.manifest(version)
        there = {info.key async for info in self._run.backend.scan(checkpoint_prefix(version))}
        named = {ref.key for ref in manifest.receipts} | {ref.key for ref in manifest.receipt_parts}
        return named <= there

    async def _delete_data(self, version: Version) -> None:
        """Everything of a checkpoint that has no manifest any more, but for its tombstone. Receipts go first: what has
        lost a shard has lost them before."""
        try:
            await self._run.backend.head(manifest_key(version))
        except NotFound:
            # Whoever removed it may have died before it was gone for good.
            await settle(self._run.backend, manifest_key(version))
        else:
            raise StorageError("is still there", key=manifest_key(version))
        keys = [info.key async for info in self._run.backend.scan(checkpoint_prefix(version))]
        await self._delete([key for key in keys if key.endswith(".json")])
        await self._delete([key for key in keys if not key.endswith(".json")])
        await self._delete([info.key async for info in self._run.backend.scan(f"{MARKS}{version}/")])

    async def _delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETED_AT_ONCE_MAX):
            await self._run.backend.delete(keys[start : start + DELETED_AT_ONCE_MAX])

    async def forget(self, found: Found) -> None:
        """Tombstones go that nobody can be too late for any more."""
        gone = found.announced.keys() - found.committed - self.outcome.failed.keys()
        for version in sorted(gone, key=order):
            if found.now_seconds - found.announced[version] > TOMBSTONE_SECONDS:
                try:
                    await self._delete([tombstone_key(version)])
                except (StorageError, ExceptionGroup) as error:
                    self.outcome.failed[version] = first_line(first_of(error))
