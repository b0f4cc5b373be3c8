"""Restore: agree on the newest checkpoint that all ranks can have, prove it, vote, and only then touch the live state.

A rank reads what it needs of it, from this node's memory where the daemon still holds it, else from the nearest tier
that has it sound. What fails to verify on a rank in every tier sends all ranks to the next older checkpoint, and the
report says why. What no store can tell is an error, never "nothing".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from ckptd.checkpoint.selectors import spoken
from ckptd.errors import CkptdError, IntegrityError, NoCheckpoint, first_line, from_fields, to_fields
from ckptd.format.keys import Version, parse_version
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import Prepared, State
from ckptd_client.capture.misfit import refuse_unexpected
from ckptd_client.capture.selection import refuse_unmatched
from ckptd_client.capture.stored import Stored
from ckptd_client.committed import CommittedCheckpoint
from ckptd_client.decision import all_names, in_words, is_newer, judged, listed, offered, usable
from ckptd_client.each_ranks import EachRanks, states_of_each_rank
from ckptd_client.held import HeldCheckpoint, HeldSnapshot, MemoryOffers
from ckptd_client.nearest import UNPROVEN, Found, from_nearest, mark_verified_meanwhile, to_be_marked
from ckptd_client.restored import EMPTY_REPORT, Restored, Source, Wish
from ckptd_client.roots import Root

_log = logging.getLogger(__name__)


class _Attempt(NamedTuple):
    prepared: Prepared | None
    refusal: dict[str, Any] | None
    read_from: Root | None = None
    """``None`` where it came from memory."""
    passed_over: tuple[str, ...] = ()
    """Nearer tiers, and why they did not do."""
    unused: tuple[str, ...] = ()
    """Why what this node has in memory of it was not enough."""

    @property
    def source(self) -> Source:
        if self.prepared is None:
            return "none"
        return "memory" if self.read_from is None else "storage"


class Restorer:
    """Restores one rank's state."""

    def __init__(
        self,
        state: State,
        agreement: Agreement,
        roots: Sequence[Root],
        offers: MemoryOffers,
        life_ahead: Callable[[Version], AbstractContextManager[None]],
        wish: Wish,
    ) -> None:
        """``life_ahead``: entered while what it is called with is brought into the live state."""
        self._state = state
        self._agreement = agreement
        self._roots = roots
        self._offers = offers
        self._life_ahead = life_ahead
        self._wish = wish
        self._run_id = ""
        self._in_memory: list[str] = []
        """Versions that every rank that saved has left in some node's memory."""
        self._noted: list[str] = []
        """In words, what is not even tried, or only at last, and why."""

    def restore(self) -> Restored:
        """See :meth:`ckptd_client.Checkpointer.restore`."""
        reshaping = self._agreement.decide(self._wish.words, self._state.reshaping, all_names)
        candidates = self._candidates()
        passed_over = [*self._noted]
        for text in candidates:
            version = parse_version(text)
            attempt, outcome = self._attempt(version, reshaping)
            refusals = outcome["refusals"]
            if not refusals:
                return self._take(version, attempt, outcome, passed_over)
            for refusal in refusals:
                if refusal["final"]:
                    raise from_fields(
                        refusal["error"], f"rank {refusal['rank']}: {refusal['message']}", refusal["hint"]
                    )
            reason = "; ".join(f"rank {refusal['rank']}: {refusal['message']}" for refusal in refusals[:4])
            passed_over.append(f"step {spoken(version)} was passed over: {reason}")
            _log.warning("%s", passed_over[-1])
        if candidates:
            raise IntegrityError(
                f"{self._where}: none of {len(candidates)} checkpoints verifies: {passed_over[len(self._noted)]}",
                hint="`ckptd verify` says of each what is wrong with it",
            )
        if self._wish.required:
            raise NoCheckpoint(
                f"{self._where}: there is no checkpoint", hint="restore without required=True to start anew"
            )
        found = Restored(report=replace(EMPTY_REPORT, notices=tuple(passed_over)))
        found.decision = "; ".join([found.decision, *passed_over])
        return found

    def _attempt(self, version: Version, reshaping: Sequence[str]) -> tuple[_Attempt, dict[str, Any]]:
        """What this rank has of a checkpoint, and what the votes of all ranks add up to."""
        attempt = self._prepare(version, states_of_each_rank(self._agreement, self._roots, version, reshaping))
        outcome = self._agreement.decide("vote", self._vote(attempt), judged)
        if str(version) not in self._in_memory or not any(r["error"] == "NoCheckpoint" for r in outcome["refusals"]):
            return attempt, outcome
        # Some rank needs what other nodes have in memory. All of it is sealed, so it is about to be committed.
        self._offers.await_idle()
        self._agreement.decide("idle", None, lambda _: None)
        states = states_of_each_rank(self._agreement, self._roots, version, reshaping)
        if attempt.prepared is None:
            attempt = self._prepare(version, states)
        return attempt, self._agreement.decide("vote", self._vote(attempt), judged)

    def _take(
        self, version: Version, attempt: _Attempt, outcome: dict[str, Any], passed_over: Sequence[str]
    ) -> Restored:
        prepared = attempt.prepared
        assert prepared is not None
        refuse_unmatched(outcome["unmatched"])
        if self._wish.strict:
            refuse_unexpected(outcome["unexpected"])
        proven = outcome["everything"] and prepared.ranks.same
        marked_at = to_be_marked(self._agreement, self._roots, attempt.read_from) if proven else None
        # What only waits for disks and servers does so while memory is copied.
        with self._life_ahead(version), mark_verified_meanwhile(marked_at, version):
            self._apply(prepared)
        decided = in_words(version, prepared.ranks.saved_world, outcome["sources"])
        decision = "; ".join([decided, *outcome["unused"], *passed_over])
        _log.info("restored %s", decision)
        report = replace(
            prepared.report,
            unexpected=tuple(outcome["unexpected"]),
            notices=(*outcome["unused"], *passed_over, *attempt.passed_over, *prepared.report.notices),
        )
        tier = attempt.read_from.url if attempt.read_from is not None else ""
        return Restored(
            version.step, attempt.source, 0, version, decision, report, prepared.values, tier, prepared.amount
        )

    def _apply(self, prepared: Prepared) -> None:
        """Bring it into the live state, on all ranks or with an error on all: a rank whose objects refuse what they had
        saved, or that has no memory left, must not be left behind by the others."""
        trouble = None
        try:
            prepared.apply()
        except Exception as error:
            trouble = {"rank": self._agreement.rank, **to_fields(error)}
        failed = self._agreement.decide("applied", trouble, lambda all_: [each for each in all_ if each is not None])
        if failed:
            first = failed[0]
            raise from_fields(
                first["error"], f"rank {first['rank']} could not apply what it read: {first['message']}", first["hint"]
            )

    # The decision

    def _candidates(self) -> list[str]:
        """Versions in the order in which to try them; the same on all ranks."""
        self._run_id, self._in_memory, some, unhealthy = self._agreement.decide(
            "offers",
            lambda: offered(self._offers.held(), self._wish.step),
            lambda all_held: run_blocking(usable(self._roots, all_held)),
        )
        if not self._in_memory:
            # Somebody's snapshot is gone. What the daemons still write may become the newest checkpoint.
            self._offers.await_idle()
        wanted = self._wish.step
        candidates, self._noted = self._agreement.decide(
            "candidates", None, lambda _: run_blocking(listed(self._roots, wanted, self._in_memory, unhealthy))
        )
        if wanted == "latest":
            self._noted += [words for text, words in some if is_newer(text, candidates)]
        return candidates

    @property
    def _where(self) -> str:
        return ", ".join(root.url for root in self._roots)

    # Preparing

    def _prepare(self, version: Version, each_ranks: EachRanks) -> _Attempt:
        """Everything but touching the live state."""
        unused: list[str] = []
        try:
            held = self._held(version, unused)
            prepared = self._from_memory(held, unused) if held else None
            if prepared is not None:
                return _Attempt(prepared, None)
            if isinstance(each_ranks, CkptdError):
                raise each_ranks
            found = self._from_storage(version, held, each_ranks)
            return _Attempt(found.value, None, found.root, found.passed_over, tuple(unused))
        except Exception as error:  # the user's own code runs here as well, and the others wait for this vote
            final = not isinstance(error, UNPROVEN)
            if not isinstance(error, CkptdError):
                _log.exception("the restore failed on this rank")
            return _Attempt(None, {"rank": self._agreement.rank, "final": final, **to_fields(error)})

    def _held(self, version: Version, unused: list[str]) -> dict[int, HeldSnapshot]:
        """What is sound, at first sight, of a checkpoint in this node's memory. Why something is not goes to
        ``unused``."""
        found: dict[int, HeldSnapshot] = {}
        for offer in self._offers.held():
            if (offer.step, offer.generation, offer.run) != (version.step, version.generation, self._run_id):
                continue
            try:
                found.setdefault(offer.rank, HeldSnapshot.at(self._offers, offer))
            except CkptdError as error:
                unused.append(f"the snapshot of rank {offer.rank} in memory is damaged: {first_line(error)}")
                _log.warning("%s", unused[-1])
        return found

    def _from_memory(self, held: Mapping[int, HeldSnapshot], unused: list[str]) -> Prepared | None:
        try:
            ranks, scratch = self._agreement, self._offers.scratch
            checkpoint = HeldCheckpoint(held, self._roots[0], rank=ranks.rank, world=ranks.world, scratch=scratch)
            return self._fitted(checkpoint)
        except UNPROVEN as error:
            unused.append(first_line(error))
            _log.warning("not restored from memory: %s", unused[-1])
            return None

    def _from_storage(
        self, version: Version, held: Mapping[int, HeldSnapshot], each_ranks: Mapping[str, Sequence[Any]]
    ) -> Found[Prepared]:
        memory = {rank: snapshot.memory for rank, snapshot in held.items()}

        def read(root: Root) -> Prepared:
            with CommittedCheckpoint(
                root,
                version,
                rank=self._agreement.rank,
                world=self._agreement.world,
                memory=memory,
                scratch=self._offers.scratch,
                each_ranks=each_ranks,
            ) as checkpoint:
                return self._fitted(checkpoint)

        found = from_nearest(self._roots, read)
        for snapshot in held.values():
            snapshot.check_still_there()
        return found

    def _fitted(self, checkpoint: Stored) -> Prepared:
        """A checkpoint, wherever it lies, checked against the live state and read as far as it is wished for."""
        wish = self._wish
        return self._state.prepare(checkpoint, strict=wish.strict, selection=wish.selection, cast_=wish.cast)

    def _vote(self, attempt: _Attempt) -> dict[str, Any]:
        unexpected = attempt.prepared.report.unexpected if attempt.prepared is not None else ()
        return {
            "refusal": attempt.refusal,
            "source": attempt.source,
            "unexpected": list(unexpected),
            "unmatched": dict(attempt.prepared.unmatched) if attempt.prepared is not None else {},
            "everything": self._wish.selection.everything,
            "unused": [f"rank {self._agreement.rank} not from memory: {reason}" for reason in attempt.unused],
        }
