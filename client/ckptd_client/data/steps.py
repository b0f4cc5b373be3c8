"""What makes a stream's batches, in the trainer's process or in workers of a :class:`torch.utils.data.DataLoader`.

A worker is asked for batch after batch by number, and finds out by itself what it has to pass over. So it may live on
from one iteration to the next, and batches are the same for any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Dataset, Sampler, get_worker_info

from ckptd_client.data.head import Head
from ckptd_client.data.order import Exhausted, Order, Sample
from ckptd_client.data.position import OrderPosition
from ckptd_client.data.seeds import mixed, seed_worker
from ckptd_client.data.sources import Source


@dataclass(frozen=True)
class Recipe:
    """What batches are made of."""

    sources: Mapping[str, Source]
    weights: Mapping[str, float]
    exhausted: Exhausted
    shuffle: bool
    length: int | None
    """Tokens of a sequence where records are packed."""
    lanes: int
    """0: one order that all ranks share."""
    batch_size: int
    drop_last: bool
    rank: int
    world: int
    transform: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any]

    def order(self, lane: int, seed: int) -> Order:
        """The order of one lane."""
        share = {"lane": lane, "lanes": max(self.lanes, 1)}
        heads = {
            name: Head(name, source, seed=seed, shuffle=self.shuffle, length=self.length, **share)
            for name, source in self.sources.items()
        }
        return Order(heads, self.weights, seed=mixed(seed, lane), exhausted=self.exhausted)


class Request(NamedTuple):
    """Asks for one batch."""

    iteration: int
    number: int
    """Which batch since the iteration began."""
    seed: int
    start: Mapping[int, OrderPosition]
    """Lane → where the iteration began."""


class Made(NamedTuple):
    """A batch, and where its lane is after it for all ranks."""

    batch: Any
    lane: int
    end: OrderPosition


class Ended(NamedTuple):
    """There are no more batches from this worker."""

    worker: int


class Requests(Sampler[Request]):
    """Asks for the batches of an iteration; the stream ends it."""

    def __init__(self) -> None:
        self.start: Mapping[int, OrderPosition] = {}
        self.seed = 0
        self._iterations = itertools.count()

    def __iter__(self) -> Iterator[Request]:
        iteration = next(self._iterations)
        return (Request(iteration, number, self.seed, self.start) for number in itertools.count())


@dataclass
class _Walk:
    """What a worker knows of one iteration."""

    iteration: int
    orders: dict[int, Order]
    at: dict[int, OrderPosition]
    number: int = 0
    """Steps that were taken, where all ranks share one order."""
    ended: set[int] = field(default_factory=set[int])


class Steps(Dataset[Made | Ended]):
    """Batch by request."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._walk: _Walk | None = None

    def __getitem__(self, request: Request) -> Made | Ended:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self._walk is None or self._walk.iteration != request.iteration:
            lanes = list(request.start) if not self._recipe.lanes else list(request.start)[worker::workers]
            orders = {lane: self._recipe.order(lane, request.seed) for lane in lanes}
            self._walk = _Walk(request.iteration, orders, {lane: request.start[lane] for lane in lanes})
        made = self._from_lane if self._recipe.lanes else self._from_shared
        return made(self._walk, request) or Ended(worker)

    def _from_shared(self, walk: _Walk, request: Request) -> Made | None:
        recipe, order = self._recipe, walk.orders[0]
        while not walk.ended:
            mine = walk.number == request.number
            step = order.step(
                walk.at[0],
                recipe.batch_size,
                rank=recipe.rank,
                world=recipe.world,
                drop_last=recipe.drop_last,
                mine=mine,
            )
            if step is None:
                walk.ended.add(0)
                break
            samples, walk.at[0] = step
            walk.number += 1
            if mine:
                return self._made(samples, 0, walk.at[0], request.seed)
        return None

    def _from_lane(self, walk: _Walk, request: Request) -> Made | None:
        recipe = self._recipe
        while open_lanes := [lane for lane in walk.orders if lane not in walk.ended]:
            lane = min(open_lanes, key=lambda lane: (walk.at[lane].place, lane))
            step = walk.orders[lane].step(walk.at[lane], recipe.batch_size, rank=0, world=1, drop_last=recipe.drop_last)
            if step is not None:
                samples, walk.at[lane] = step
                return self._made(samples, lane, walk.at[lane], request.seed)
            walk.ended.add(lane)
        return None

    def _made(self, samples: Sequence[Sample], lane: int, end: OrderPosition, seed: int) -> Made:
        recipe = self._recipe
        batch: list[Any] = []
        for place, sample in samples:
            seed_worker(mixed(seed, lane, place))
            batch.append(sample if recipe.transform is None else recipe.transform(sample))
        return Made(recipe.collate(batch), lane, end)
