"""Restore: agree on the newest checkpoint that all ranks can have, prove it, vote, and only then touch the live state.

A rank reads its own shard, from memory where the daemon still holds it, else from the nearest tier that has it sound.
What fails to verify on a rank in every tier sends all ranks to the next older checkpoint, and the report says why. What
no store can tell is an error, never "nothing".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptd.checkpoint.selectors import Selector, spoken
from ckptd.errors import CkptdError, IntegrityError, NoCheckpoint, from_fields, to_fields
from ckptd.format.keys import Version, parse_version
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import Prepared, Report, State
from ckptd_client.nearest import UNPROVEN, Found, candidates, from_nearest, mark_verified, run_in
from ckptd_client.proven import MemoryOffers, Proven, Source, from_memory, from_storage
from ckptd_client.roots import Root

CANDIDATES_MAX = 16
"""So many checkpoints, newest first, are tried before a restore gives up."""

_log = logging.getLogger(__name__)

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
    tier: str = ""
    """The URL of the tier that this rank has read; empty where it came from memory."""


class Restorer:
    """Restores one rank's state."""

    def __init__(
        self,
        state: State,
        agreement: Agreement,
        roots: Sequence[Root],
        offers: MemoryOffers,
        scratch: Callable[[int], memoryview | None],
    ) -> None:
        self._state = state
        self._agreement = agreement
        self._roots = roots
        self._offers = offers
        self._scratch = scratch
        self._run_id = ""

    def restore(self, step: Selector, *, required: bool, strict: bool) -> Restored:
        """See :meth:`ckptd_client.Checkpointer.restore`."""
        candidates = self._candidates(step)
        passed_over: list[str] = []
        for text in candidates:
            version = parse_version(text)
            prepared, source, read_from, vote = self._prepare(version, strict)
            refusals = self._agreement.decide("vote", vote, _refusals)
            if not refusals:
                assert prepared is not None
                self._apply(prepared)
                mark_verified(self._agreement, self._roots, read_from.root if read_from else None, version)
                nearer = read_from.passed_over if read_from else ()
                report = replace(prepared.report, notices=(*passed_over, *nearer, *prepared.report.notices))
                tier = read_from.root.url if read_from else ""
                return Restored(version.step, source, 0, version, report, prepared.values, tier)
            for refusal in refusals:
                if refusal["final"]:
                    raise from_fields(
                        refusal["error"], f"rank {refusal['rank']}: {refusal['message']}", refusal["hint"]
                    )
            reason = "; ".join(f"rank {refusal['rank']}: {refusal['message']}" for refusal in refusals[:4])
            passed_over.append(f"step {spoken(version)} was passed over: {reason}")
            _log.warning("%s", passed_over[-1])
        if candidates:
            raise IntegrityError(f"{self._where}: none of {len(candidates)} checkpoints verifies: {passed_over[0]}")
        if required:
            raise NoCheckpoint(
                f"{self._where}: there is no checkpoint", hint="restore without required=True to start anew"
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
        """The id of the run that lies in the tiers now, empty where there is none, and the snapshots of it that every
        rank holds in memory. What is left of a run that was deleted counts for nothing."""
        run_id = await run_in(self._roots)
        ours = [{version for version, of_run in each if of_run == run_id and run_id} for each in held]
        return [run_id, sorted(ours[0].intersection(*ours[1:]))]

    async def _list(self, step: Selector, in_memory: list[Version]) -> list[str]:
        found = await candidates(self._roots, step, in_memory)
        return [str(version) for version in found[:CANDIDATES_MAX]]

    @property
    def _where(self) -> str:
        return ", ".join(root.url for root in self._roots)

    def _prepare(
        self, version: Version, strict: bool
    ) -> tuple[Prepared | None, Source, Found[Proven] | None, dict[str, Any] | None]:
        """Everything but touching the live state; from which tier it came, ``None`` for memory; and this rank's vote,
        ``None`` for yes."""
        try:
            ours = self._offers.held().get(version) == self._run_id
            proven = from_memory(self._offers, self._roots[0], version) if ours else None
            found = None
            if proven is None:
                found = from_nearest(self._roots, lambda root: self._read(root, version))
                proven = found.value
            prepared = self._state.prepare(bytes(proven.snapshot.tree), proven.layout, proven.tensor, strict=strict)
            return prepared, proven.source, found, None
        except CkptdError as error:
            vote = {
                "rank": self._agreement.rank,
                "final": not isinstance(error, UNPROVEN),
                **to_fields(error),
            }
            return None, "none", None, vote

    def _read(self, root: Root, version: Version) -> Proven:
        rank, world = self._agreement.rank, self._agreement.world
        return run_blocking(from_storage(root, version, rank, world, self._scratch))


def _refusals(votes: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [vote for vote in votes if vote is not None]
