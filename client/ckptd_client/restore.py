"""Restore: agree on the newest checkpoint that all ranks can have, prove it, vote, and only then touch the live state.

A rank reads its own shard, from memory where the daemon still holds it, else from storage. Whatever fails to verify on
any rank sends all ranks to the next older checkpoint, and the report says why. What the store cannot tell is an error,
never "nothing".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import Selector, choose, spoken
from ckptd.errors import (
    CkptdError,
    FormatError,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    ShortRead,
    from_fields,
    to_fields,
)
from ckptd.format.keys import Version, parse_version
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import Prepared, Report, State
from ckptd_client.proven import MemoryOffers, Source, from_memory, from_storage, mark_verified
from ckptd_client.roots import Root

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
        self._run_id = ""

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
                        run_blocking(mark_verified(self._root, version))
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
        self._run_id, in_memory = self._agreement.decide(
            "offers", held, lambda all_held: run_blocking(self._usable(all_held))
        )
        if not in_memory:
            # Somebody's snapshot is gone. What the daemons still write may become the newest checkpoint.
            self._offers.await_idle()
        versions = [parse_version(text) for text in in_memory]
        return self._agreement.decide("candidates", None, lambda _: run_blocking(self._list(step, versions)))

    async def _usable(self, held: list[list[list[str]]]) -> list[Any]:
        """The id of the run that lies at the root now, empty where there is none, and the snapshots of it that every
        rank holds in memory. What is left of a run that was deleted counts for nothing."""
        async with self._root.visit() as backend:
            try:
                run = await Run.open(backend)
            except NoCheckpoint:
                return ["", []]
        ours = [{version for version, run_id in each if run_id == run.id} for each in held]
        return [run.id, sorted(ours[0].intersection(*ours[1:]))]

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
            ours = self._offers.held().get(version) == self._run_id
            proven = from_memory(self._offers, self._root, version) if ours else None
            if proven is None:
                rank, world = self._agreement.rank, self._agreement.world
                proven = run_blocking(from_storage(self._root, version, rank, world, self._scratch))
            prepared = self._state.prepare(bytes(proven.snapshot.tree), proven.layout, proven.tensor, strict=strict)
            return prepared, proven.source, None
        except CkptdError as error:
            vote = {
                "rank": self._agreement.rank,
                "final": not isinstance(error, _UNPROVEN),
                **to_fields(error),
            }
            return None, "none", vote


def _refusals(votes: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [vote for vote in votes if vote is not None]
