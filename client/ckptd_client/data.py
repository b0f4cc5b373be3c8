"""Data in an order that can be taken up again: a loader whose position is the samples that the trainer was given.

One order for the whole world follows from ``(seed, epoch)`` alone, never from the global generators. The position is a
place in that order, counted in samples over all ranks: it survives another batch size, another number of workers and
another world size, and what workers fetched ahead does not count.
"""

# torch leaves types open
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ckptd.errors import MismatchError, UsageError

Item = tuple[int, int]
"""What the sampler asks the dataset for: an index, and the seed for whatever is drawn while it is made."""


def _mixed(*numbers: int) -> int:
    """63 well-mixed bits that follow from the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ResumableSampler(Sampler[list[Item]]):
    """The batches of one rank, from a position in an epoch on.

    Each step takes ``batch_size * world`` samples of the order, ``batch_size`` for each rank. Every rank gets the same
    number of batches: the last ones of an epoch are smaller, and what is left when fewer samples than ranks remain,
    or, with ``drop_last``, less than a whole step, is left out.
    """

    def __init__(
        self, samples: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool, rank: int, world: int
    ) -> None:
        """Raises :class:`UsageError` for sizes below one and a rank outside the world."""
        if batch_size < 1 or samples < 1 or not 0 <= rank < world:
            raise UsageError(f"{samples} samples in batches of {batch_size} for rank {rank} of {world}")
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank = rank
        self._world = world

    def stride(self, position: int) -> int:
        """How many samples all ranks together take at the next step; 0 at the end of the epoch."""
        whole = self._batch_size * self._world
        left = max(self.samples - position, 0)
        if left >= whole:
            return whole
        return 0 if self._drop_last or left < self._world else left

    def __len__(self) -> int:
        """Batches of a whole epoch for each rank."""
        whole, left = divmod(self.samples, self._batch_size * self._world)
        return whole + (0 if self._drop_last or left < self._world else 1)

    def __iter__(self) -> Iterator[list[Item]]:
        epoch, position = self.epoch, self.position
        order = self._order(epoch)
        while taken := self.stride(position):
            first = position + taken * self._rank // self._world
            last = position + taken * (self._rank + 1) // self._world
            indices = range(first, last) if order is None else cast("list[int]", order[first:last].tolist())
            yield [(index, _mixed(self.seed, epoch, place)) for place, index in enumerate(indices, first)]
            position += taken

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(_mixed(self.seed, epoch)))


class ResumableLoader:
    """A :class:`torch.utils.data.DataLoader` over a map-style dataset that goes on where its state says.

    ``iter()`` goes on from the position, to the end of the epoch; an iterator that ends opens the next epoch. At the
    very end of an epoch, before the iterator has said so, the position is the end: the iterator of a restored loader
    then gives nothing and opens the next epoch, as the uninterrupted one would have.

    Random numbers that the dataset draws in worker processes are seeded for each sample, so that they do not depend on
    the number of workers or on where the run was interrupted.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        **options: Any,
    ) -> None:
        """``options`` are those of ``DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on. Raises
        :class:`UsageError` for sizes that cannot be."""
        samples = len(cast(Sized, dataset))
        self._sampler = ResumableSampler(
            samples, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, rank=rank, world=world
        )
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            _Seeding(dataset), batch_sampler=self._sampler, generator=self._generator, **options
        )
        self._current: weakref.ref[_Epoch] | None = None

    @property
    def epoch(self) -> int:
        """The number of the pass over the data that the next batch belongs to."""
        return self._sampler.epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that the trainers of all ranks were given."""
        return self._sampler.position

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Go on from the position. An iterator made earlier gives nothing more: its next batch is an error."""
        self._generator.manual_seed(_mixed(self._sampler.seed, self.epoch, self.position, -1))
        iterator = _Epoch(self, iter(self._loader))
        self._current = weakref.ref(iterator)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and position, in samples over all ranks, and what they are valid for."""
        sampler = self._sampler
        return {
            "unit": "samples",
            "position": sampler.position,
            "epoch": sampler.epoch,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "samples": sampler.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the state was taken.

        Raises :class:`UsageError` while an iterator is alive, whose workers have fetched from the old position, and
        :class:`MismatchError` where the state is for another number of samples or another kind of order.
        """
        if self._current is not None and (iterator := self._current()) is not None and not iterator.over:
            raise UsageError(
                "the loader is being iterated and cannot take a state", hint="restore before the loop, not within it"
            )
        sampler = self._sampler
        for field, live in (("unit", "samples"), ("samples", sampler.samples), ("shuffle", sampler.shuffle)):
            if state.get(field) != live:
                raise MismatchError(f"the loader's state has {field}={state.get(field)!r}, and here it is {live!r}")
        seed, epoch, position = (state.get(field) for field in ("seed", "epoch", "position"))
        if not (isinstance(seed, int) and isinstance(epoch, int) and isinstance(position, int)):
            raise MismatchError("the loader's state has no seed, epoch and position")
        if epoch < 0 or not 0 <= position <= sampler.samples:
            raise MismatchError(f"the loader's state has position {position} of {sampler.samples} in epoch {epoch}")
        sampler.seed, sampler.epoch, sampler.position = seed, epoch, position

    def _is_current(self, iterator: _Epoch) -> bool:
        return self._current is not None and self._current() is iterator

    def _given(self) -> None:
        """A batch goes to the trainer."""
        self._sampler.position += self._sampler.stride(self._sampler.position)

    def _ended(self) -> None:
        self._sampler.epoch += 1
        self._sampler.position = 0


class _Epoch(Iterator[Any]):
    """The rest of one epoch; counts what it gives."""

    def __init__(self, loader: ResumableLoader, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches
        self.over = False

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        if not self._loader._is_current(self):
            raise UsageError("a newer iterator over this loader has taken over", hint="keep one iterator at a time")
        try:
            batch = next(self._batches)
        except StopIteration:
            self.over = True
            self._loader._ended()
            raise
        self._loader._given()
        return batch


class _Seeding(Dataset[Any]):
    """The dataset, with the generators of a worker process seeded for each sample.

    In the trainer's own process nothing is seeded: its generators are part of the state.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, item: Item) -> Any:
        index, seed = item
        if get_worker_info() is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        return self._dataset[index]
