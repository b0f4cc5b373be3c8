"""Restore: agree on the newest checkpoint that all ranks can have, prove it, vote, and only then touch the live state.

A rank reads what it needs of it, from this node's memory where the daemon still holds it, else from the nearest tier
that has it sound. What fails to verify on a rank in every tier sends all ranks to the next older checkpoint, and the
report says why. What no store can tell is an error, never "nothing".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import Selector, spoken
from ckptd.errors import CkptdError, IntegrityError, NoCheckpoint, first_line, from_fields, to_fields
from ckptd.format.keys import Version, parse_version
from ckptd.format.tree import decode_json
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import Prepared, Report, State
from ckptd_client.capture.nodes import node_at
from ckptd_client.capture.restore import refuse_unexpected
from ckptd_client.capture.selection import EVERYTHING, NOTHING, Selection
from ckptd_client.committed import CommittedCheckpoint
from ckptd_client.gather import Scratch
from ckptd_client.held import HeldCheckpoint, HeldSnapshot, MemoryOffers
from ckptd_client.nearest import UNPROVEN, Found, candidates, from_nearest, mark_verified, run_in
from ckptd_client.roots import Root

CANDIDATES_MAX = 16
"""So many checkpoints, newest first, are tried before a restore gives up."""

Source = Literal["memory", "storage", "none"]

_log = logging.getLogger(__name__)

EMPTY_REPORT = Report((), (), (), (), ())


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
    decision: str = "there is no checkpoint"
    """What all ranks agreed on, and why: the step, where each rank has it from, and what was passed over."""
    report: Report = EMPTY_REPORT
    """What was loaded, missing, unexpected, skipped and why; newer checkpoints that did not verify are notices."""
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    """The checkpoint's whole state tree as plain values, with a reference where it has a tensor."""
    tier: str = ""
    """The URL of the tier that this rank has read; empty where it came from memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller wants restored, and how."""

    step: Selector = "latest"
    required: bool = False
    strict: bool = True
    selection: Selection = EVERYTHING
    cast: Selection = NOTHING


class _Attempt(NamedTuple):
    prepared: Prepared | None
    refusal: dict[str, Any] | None
    read_from: Root | None = None
    """``None`` where it came from memory."""
    passed_over: tuple[str, ...] = ()
    """Nearer tiers, and why they did not do."""

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
        scratch: Scratch,
        wish: Wish,
    ) -> None:
        self._state = state
        self._agreement = agreement
        self._roots = roots
        self._offers = offers
        self._scratch = scratch
        self._wish = wish
        self._run_id = ""

    def restore(self) -> Restored:
        """See :meth:`ckptd_client.Checkpointer.restore`."""
        reshaping = self._agreement.decide("reshaping", self._state.reshaping(), _all_names)
        candidates = self._candidates()
        passed_over: list[str] = []
        for text in candidates:
            version = parse_version(text)
            attempt = self._prepare(version, self._states_of_each_rank(version, reshaping))
            outcome = self._agreement.decide("vote", self._vote(attempt), _judged)
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
                f"{self._where}: none of {len(candidates)} checkpoints verifies: {passed_over[0]}",
                hint="`ckptd verify` says of each what is wrong with it",
            )
        if self._wish.required:
            raise NoCheckpoint(
                f"{self._where}: there is no checkpoint", hint="restore without required=True to start anew"
            )
        return Restored()

    def _take(
        self, version: Version, attempt: _Attempt, outcome: dict[str, Any], passed_over: Sequence[str]
    ) -> Restored:
        prepared = attempt.prepared
        assert prepared is not None
        if self._wish.strict:
            refuse_unexpected(outcome["unexpected"])
        self._apply(prepared)
        if self._wish.selection.everything and prepared.ranks.same:
            mark_verified(self._agreement, self._roots, attempt.read_from, version)
        decision = "; ".join([_decision(version, prepared.ranks.saved_world, outcome["sources"]), *passed_over])
        _log.info("restored %s", decision)
        report = replace(
            prepared.report,
            unexpected=tuple(outcome["unexpected"]),
            notices=(*passed_over, *attempt.passed_over, *prepared.report.notices),
        )
        tier = attempt.read_from.url if attempt.read_from is not None else ""
        return Restored(version.step, attempt.source, 0, version, decision, report, prepared.values, tier)

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
        held = [[str(Version(o.step, o.generation)), o.run, o.world, o.rank] for o in self._offers.held()]
        self._run_id, in_memory = self._agreement.decide(
            "offers", held, lambda all_held: run_blocking(self._usable(all_held))
        )
        if not in_memory:
            # Somebody's snapshot is gone. What the daemons still write may become the newest checkpoint.
            self._offers.await_idle()
        versions = [parse_version(text) for text in in_memory]
        return self._agreement.decide("candidates", None, lambda _: run_blocking(self._list(versions)))

    async def _usable(self, held: list[list[list[Any]]]) -> list[Any]:
        """The id of the run that lies in the tiers now, empty where there is none, and the snapshots of it that are in
        memory for every rank that took one. What is left of a run that was deleted counts for nothing."""
        run = await run_in(self._roots)
        found: dict[str, set[int]] = {}
        worlds: dict[str, int] = {}
        for version, run_id, world, rank in (offer for of_rank in held for offer in of_rank):
            if run_id == run:
                found.setdefault(version, set()).add(rank)
                worlds[version] = world
        return [run, sorted(version for version, ranks in found.items() if len(ranks) == worlds[version])]

    async def _list(self, in_memory: list[Version]) -> list[str]:
        found = await candidates(self._roots, self._wish.step, in_memory)
        return [str(version) for version in found[:CANDIDATES_MAX]]

    @property
    def _where(self) -> str:
        return ", ".join(root.url for root in self._roots)

    # States that another number of ranks takes over

    def _states_of_each_rank(self, version: Version, names: Sequence[str]) -> dict[str, list[Any]]:
        """By name of an object, the node of each rank that saved it; empty on as many ranks as saved. Read once, by
        rank 0."""
        if not names:
            return {}

        def read(_: object) -> dict[str, list[Any]]:
            try:
                return from_nearest(
                    self._roots, lambda root: run_blocking(self._read_states(root, version, names))
                ).value
            except CkptdError as error:
                # Whoever needs them finds them missing, and says so in its vote.
                _log.warning("the states of all ranks at step %d cannot be read: %s", version.step, first_line(error))
                return {}

        return self._agreement.decide("states", None, read)

    async def _read_states(self, root: Root, version: Version, names: Sequence[str]) -> dict[str, list[Any]]:
        async with (
            root.visit() as backend,
            await CheckpointReader.open(await Run.open(backend), version, holder=root.holder) as reader,
        ):
            world = reader.manifest.world
            if world == self._agreement.world:
                return {}
            found: dict[str, list[Any]] = {name: [] for name in names}
            for rank in range(world):
                tree = decode_json(bytes((await reader.receipt(rank)).snapshot.tree))
                for name in names:
                    found[name].append(node_at(tree, name))
        return {name: nodes for name, nodes in found.items() if all(node is not None for node in nodes)}

    # Preparing

    def _prepare(self, version: Version, each_ranks: Mapping[str, Sequence[Any]]) -> _Attempt:
        """Everything but touching the live state."""
        try:
            held = self._held(version)
            prepared = self._from_memory(held, each_ranks) if held else None
            if prepared is not None:
                return _Attempt(prepared, None)
            found = self._from_storage(version, held, each_ranks)
            return _Attempt(found.value, None, found.root, found.passed_over)
        except CkptdError as error:
            final = not isinstance(error, UNPROVEN)
            return _Attempt(None, {"rank": self._agreement.rank, "final": final, **to_fields(error)})

    def _held(self, version: Version) -> dict[int, HeldSnapshot]:
        """What is sound, at first sight, of a checkpoint in this node's memory."""
        found: dict[int, HeldSnapshot] = {}
        for offer in self._offers.held():
            if (offer.step, offer.generation, offer.run) != (version.step, version.generation, self._run_id):
                continue
            try:
                found.setdefault(offer.rank, HeldSnapshot.at(self._offers, offer))
            except CkptdError as error:
                _log.warning("the snapshot of rank %d in memory is not used: %s", offer.rank, first_line(error))
        return found

    def _from_memory(
        self, held: Mapping[int, HeldSnapshot], each_ranks: Mapping[str, Sequence[Any]]
    ) -> Prepared | None:
        try:
            checkpoint = HeldCheckpoint(
                held,
                self._roots[0],
                rank=self._agreement.rank,
                world=self._agreement.world,
                scratch=self._scratch,
                each_ranks=each_ranks,
            )
            return self._state.prepare(
                checkpoint, strict=self._wish.strict, selection=self._wish.selection, cast_=self._wish.cast
            )
        except UNPROVEN as error:
            _log.warning("not restored from memory: %s", first_line(error))
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
                scratch=self._scratch,
                each_ranks=each_ranks,
            ) as checkpoint:
                return self._state.prepare(
                    checkpoint, strict=self._wish.strict, selection=self._wish.selection, cast_=self._wish.cast
                )

        try:
            found = from_nearest(self._roots, read)
        except NoCheckpoint:
            if not held:
                raise
            self._offers.await_idle()  # all have it sealed, so it is about to be committed
            found = from_nearest(self._roots, read)
        for snapshot in held.values():
            snapshot.check_still_there()
        return found

    def _vote(self, attempt: _Attempt) -> dict[str, Any]:
        unexpected = attempt.prepared.report.unexpected if attempt.prepared is not None else ()
        return {"refusal": attempt.refusal, "source": attempt.source, "unexpected": list(unexpected)}


def _judged(votes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the votes of all ranks, in their order, add up to. Only what no rank expects is unexpected."""
    everywhere = set(votes[0]["unexpected"]).intersection(*(vote["unexpected"] for vote in votes[1:]))
    return {
        "refusals": [vote["refusal"] for vote in votes if vote["refusal"] is not None],
        "unexpected": [name for name in votes[0]["unexpected"] if name in everywhere],
        "sources": [vote["source"] for vote in votes],
    }


def _all_names(of_ranks: list[list[str]]) -> list[str]:
    return sorted({name for names in of_ranks for name in names})


def _decision(version: Version, saved_world: int, sources: Sequence[str]) -> str:
    """In words, such as ``step 20 (generation 3) of 4 ranks: memory on ranks 0-2, storage on rank 3``."""
    spans: list[str] = []
    for source, group in groupby(enumerate(sources), key=lambda item: item[1]):
        ranks = [rank for rank, _ in group]
        spans.append(f"{source} on " + (f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"))
    return f"step {spoken(version)}, saved by {saved_world} ranks: {', '.join(spans)}"
