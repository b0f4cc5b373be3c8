"""Data that is read in order: sharded, mixed by weight, packed into token sequences, and taken up again anywhere."""

# torch leaves types open
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, default_collate

from ckptd.errors import MismatchError, UsageError
from ckptd_client.data.mixture import checked_weights
from ckptd_client.data.order import Exhausted
from ckptd_client.data.position import OrderPosition, SourcePosition, from_state
from ckptd_client.data.resumable import Resumable, as_state, changed, check_field
from ckptd_client.data.seeds import mixed
from ckptd_client.data.sources import Source
from ckptd_client.data.steps import Ended, Made, Recipe, Requests, Steps

Positions = Mapping[int, OrderPosition]
"""Lane → where it is. A stream without lanes has the lane 0."""


class ResumableStream(Resumable[Positions]):
    """Batches from named sources of sharded records.

    Samples are records, or with ``sequence_length`` sequences of so many tokens, cut from the records of a source laid
    end to end. Nothing is padded or thrown away: the rest of a record that was cut comes first in the next sequence,
    after a restore as well.

    **One order.** Without ``lanes`` there is one order of samples for the whole world. Which source the next one comes
    from follows from seed, place and weights; within a source, shards follow one another, in another order for each
    pass. A step takes the next ``batch_size * world`` samples. The state is the same on all ranks and fits any world,
    batch size, number of workers and accumulation. What other ranks and workers take is passed over for nothing where
    a source knows its counts (:class:`~ckptd_client.data.sources.Counted`; to pack,
    :class:`~ckptd_client.data.sources.Sized`); where it does not, every worker of every rank reads everything.

    **Lanes.** With ``lanes=n`` the shards of each source are dealt into ``n`` lanes for good, each an order of its own,
    and each lane is read by one rank and one worker alone, whatever the source knows. Batches are of one lane. The
    state of a rank holds the positions of its lanes; on another number of ranks the lanes are dealt anew
    (:meth:`reshape_state`). Ranks may end at different steps: with anything but ``exhausted="repeat"``, the loop has to
    agree on it.

    **Ends.** ``exhausted="stop"``: an iterator ends where the next sample would need more than a source has.
    ``"repeat"``: a source begins its next pass, and no iterator ends. ``"drop"``: the others go on, to the end of the
    last. After an end the next iterator goes on where the sources are, and lets each have one more pass. What was less
    than a sequence, a sample for each rank or, with ``drop_last``, a whole step, comes first then.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        batch_size: int,
        *,
        weights: Mapping[str, float] | None = None,
        exhausted: Exhausted = "stop",
        sequence_length: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulation: int = 1,
        lanes: int = 0,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        rank: int = 0,
        world: int = 1,
        **options: Any,
    ) -> None:
        """``weights``: shares of the samples, by source; all equal by default. ``shuffle``: the order of shards.
        ``transform``: applied to each sample that this rank gets, in the worker, with generators seeded for it.
        ``accumulation``: batches of an optimizer step; a state taken within one goes back to its start. ``options`` are
        those of ``DataLoader``: ``num_workers``, ``pin_memory`` and so on. Raises :class:`UsageError` for what cannot
        be."""
        if batch_size < 1 or not 0 <= rank < world or (sequence_length is not None and sequence_length < 1):
            raise UsageError(f"batches of {batch_size} of length {sequence_length} for rank {rank} of {world}")
        if exhausted not in ("stop", "repeat", "drop"):
            raise UsageError(f"exhausted={exhausted!r} is none of stop, repeat and drop")
        _check_lanes(sources, lanes, world)
        start = {lane: OrderPosition() for lane in _lanes_of(rank, world, lanes)}
        super().__init__(start, accumulation)
        self._recipe = Recipe(
            sources=dict(sources),
            weights=checked_weights(sources.keys(), weights),
            exhausted=exhausted,
            shuffle=shuffle,
            length=sequence_length,
            lanes=lanes,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=rank,
            world=world,
            transform=transform,
            collate=collate_fn,
        )
        self._seed = seed
        self._generator = torch.Generator()
        self._requests = Requests()
        self._loader: DataLoader[Any] = DataLoader(
            Steps(self._recipe),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            generator=self._generator,
            **options,
        )
        self._workers = max(self._loader.num_workers, 1)

    @property
    def samples(self) -> int:
        """Samples that the trainers of all ranks were given; with lanes, those of this rank's lanes."""
        return sum(at.place for at in self._given_to.values())

    @property
    def tokens(self) -> int:
        """Tokens that were given where records are packed, counted like :attr:`samples`."""
        return sum(source.tokens for at in self._given_to.values() for source in at.sources.values())

    @property
    def positions(self) -> dict[int, dict[str, SourcePosition]]:
        """Lane → source → where it is. A stream without lanes has the lane 0."""
        return {lane: dict(at.sources) for lane, at in self._given_to.items()}

    def state_dict(self) -> dict[str, Any]:
        """Seed and positions at the last boundary, and what they are valid for."""
        recipe = self._recipe
        return {
            "unit": "samples",
            "seed": self._seed,
            "shuffle": recipe.shuffle,
            "lanes": recipe.lanes,
            "sequence_length": recipe.length,
            "sources": {name: _identity(source) for name, source in recipe.sources.items()},
            "weights": dict(recipe.weights),
            "exhausted": recipe.exhausted,
            "drop_last": recipe.drop_last,
            "world": recipe.world,
            "batch_size": recipe.batch_size,
            "accumulation": self._accumulation,
            "orders": {str(lane): at.to_state() for lane, at in self._settled.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the state was taken. What is not as it was then is logged and added to ``changes``: world, batch
        size, accumulation, weights, what happens at ends, the length of sequences, sources that were added.

        Raises :class:`UsageError` while an iterator is alive, and :class:`MismatchError` where a source is missing or
        has other shards, records are packed now and were not then, or shards were dealt into other lanes.
        """
        self._must_be_idle()
        state, recipe = as_state(state), self._recipe
        check_field(state, "unit", "samples")
        check_field(state, "shuffle", recipe.shuffle)
        check_field(
            state, "lanes", recipe.lanes, "lanes are fixed for the life of a run: give as many as when it began"
        )
        saved_length = state.get("sequence_length")
        if (saved_length is None) != (recipe.length is None):
            check_field(state, "sequence_length", recipe.length, "positions in packed and in whole records differ")
        _check_sources(_part(state, "sources"), recipe.sources)
        orders = _part(state, "orders")
        lanes = _lanes_of(recipe.rank, recipe.world, recipe.lanes)
        if not {str(lane) for lane in lanes} <= orders.keys():
            raise MismatchError(
                f"the stream's state lacks lanes of rank {recipe.rank} of {recipe.world}",
                hint="on another number of ranks, load what reshape_state makes of the states of all",
            )
        seed = state.get("seed")
        if not isinstance(seed, int):
            raise MismatchError("the stream's state has no seed")
        positions = {lane: from_state(orders[str(lane)]).joined_by(recipe.sources) for lane in lanes}
        changes = self._changes(state, seed)
        self._seed = seed
        self._go(positions)
        self._note(changes, self._spoken())

    def reshape_state(self, states: Sequence[Any], *, rank: int, world: int) -> dict[str, Any]:
        """The state for this rank from those of all old ranks: each lane goes on where the rank that had it was.

        Raises :class:`MismatchError` where a lane is in none or in several of the states, or, without lanes, they
        differ.
        """
        saved = [as_state(state) for state in states]
        if not saved:
            raise MismatchError("there are no states of old ranks")
        if not self._recipe.lanes:
            if any(state != saved[0] for state in saved):
                raise MismatchError("the stream's states of the old ranks differ, and they share one order")
            return saved[0]
        orders: dict[str, Any] = {}
        for old_rank, state in enumerate(saved):
            found = _part(state, "orders")
            if orders.keys() & found.keys():
                raise MismatchError(f"the stream's state of old rank {old_rank} has lanes that another one has")
            orders.update(found)
        if missing := {str(lane) for lane in range(self._recipe.lanes)} - orders.keys():
            raise MismatchError(f"the stream's states of the old ranks lack lanes {', '.join(sorted(missing))}")
        return saved[0] | {
            "orders": {str(lane): orders[str(lane)] for lane in _lanes_of(rank, world, self._recipe.lanes)}
        }

    def _changes(self, state: Mapping[str, Any], seed: int) -> list[str]:
        recipe = self._recipe
        live = {
            "world": ("world", recipe.world),
            "batch_size": ("batch", recipe.batch_size),
            "accumulation": ("accumulation", self._accumulation),
            "drop_last": ("drop_last", recipe.drop_last),
            "sequence_length": ("sequence length", recipe.length),
            "exhausted": ("exhausted", recipe.exhausted),
        }
        changes = changed(state, live)
        if seed != self._seed:
            changes.append(f"seed {seed} as saved, not {self._seed}")
        weights = {name: (f"weight of {name}", weight) for name, weight in recipe.weights.items()}
        changes += changed(_part(state, "weights"), weights)
        changes += [f"source {name} is new" for name in recipe.sources if name not in state["sources"]]
        return changes

    def _spoken(self) -> str:
        totals: dict[str, list[int]] = {}
        for at in self._given_to.values():
            for name, source in sorted(at.sources.items()):
                total = totals.setdefault(name, [0, 0, 0])
                total[0] = max(total[0], source.passes)
                total[1] += source.records
                total[2] += source.tokens
        parts = [f"{name} in pass {passes} after {records} records" for name, (passes, records, _) in totals.items()]
        given = f"{self.samples} samples" + (f" and {self.tokens} tokens" if self._recipe.length else "")
        return ", ".join([*parts, f"{given} in all" + (" of this rank's lanes" if self._recipe.lanes else "")])

    def _batches(self, start: Positions) -> Iterator[tuple[Any, Positions]]:
        self._generator.manual_seed(mixed(self._seed, *(at.place for at in start.values())))
        self._requests.start, self._requests.seed = start, self._seed
        positions = dict(start)
        ended: set[int] = set()
        for made in cast("Iterator[Made | Ended]", iter(self._loader)):
            if isinstance(made, Ended):
                ended.add(made.worker)
                if not self._recipe.lanes or len(ended) == self._workers:
                    return
            else:
                positions = {**positions, made.lane: made.end}
                yield made.batch, positions

    def _next(self, end: Positions) -> Positions:
        return {lane: at.next_epoch() for lane, at in end.items()}


def _as_it_is(made: Any) -> Any:
    return made


def _lanes_of(rank: int, world: int, lanes: int) -> list[int]:
    return list(range(rank, lanes, world)) if lanes else [0]


def _check_lanes(sources: Mapping[str, Source], lanes: int, world: int) -> None:
    if not sources:
        raise UsageError("a stream has at least one source")
    if lanes < 0 or 0 < lanes < world:
        raise UsageError(f"{lanes} lanes for {world} ranks", hint="at least one lane for each rank that there may be")
    for name, source in sources.items():
        if len(source.shards) < max(lanes, 1):
            raise UsageError(f"source {name} has {len(source.shards)} shards for {lanes or 1} lanes")
        if len(set(source.shards)) < len(source.shards):
            raise UsageError(f"source {name} has two shards of one name")


def _identity(source: Source) -> dict[str, Any]:
    """What a checkpoint knows a source by."""
    digest = hashlib.blake2b("\0".join(source.shards).encode(), digest_size=16)
    return {"shards": len(source.shards), "names": digest.hexdigest()}


def _part(state: Mapping[str, Any], field: str) -> dict[str, Any]:
    found = state.get(field)
    if not isinstance(found, dict):
        raise MismatchError(f"the stream's state has no {field}")
    return cast("dict[str, Any]", found)


def _check_sources(saved: Mapping[str, Any], live: Mapping[str, Source]) -> None:
    for name, identity in saved.items():
        if name not in live:
            raise MismatchError(
                f"source {name} is in the checkpoint and not here", hint="keep it with weight 0 to read no more of it"
            )
        if identity != _identity(live[name]):
            raise MismatchError(
                f"source {name} has other shards than in the checkpoint, or in another order",
                hint="positions count in the shards as they were; give new shards as a source of their own",
            )
