"""Data with an index, in an order that can be taken up again on any number of ranks.

One order for the whole world follows from ``(seed, epoch)`` alone, never from the global generators. The position is a
place in that order, counted in samples over all ranks: it survives another batch size, another number of workers and
another world size, and what workers fetched ahead does not count.
"""

# torch leaves types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from ckptd.errors import MismatchError
from ckptd_client.data.resumable import Resumable, as_state, changed, check_field
from ckptd_client.data.sampler import Cursor, Item, ResumableSampler
from ckptd_client.data.seeds import mixed, seed_worker


class ResumableLoader(Resumable[Cursor]):
    """A :class:`torch.utils.data.DataLoader` over a map-style dataset that goes on where its state says.

    ``iter()`` goes on from the position, to the end of the epoch; an iterator that ends opens the next epoch. At the
    very end of an epoch, before the iterator has said so, the position is the end: the iterator of a restored loader
    then gives nothing and opens the next epoch, as the uninterrupted one would have.

    The state is the same on all ranks and fits any world, batch size, number of workers and accumulation: every sample
    of an epoch is given once, in the same order, however often these change. :class:`ResumableSampler` says what
    becomes of an epoch's end.

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
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        **options: Any,
    ) -> None:
        """``batch_size``: samples of one batch on one rank. ``accumulation``: batches of an optimizer step; a state
        taken within one goes back to its start, as the gradients so far are in no checkpoint. ``options`` are those of
        ``DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on. Raises :class:`UsageError` for sizes
        that cannot be."""
        super().__init__(Cursor(), accumulation)
        samples = len(cast(Sized, dataset))
        self._sampler = ResumableSampler(
            samples, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last, rank=rank, world=world
        )
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            _Seeding(dataset), batch_sampler=self._sampler, generator=self._generator, **options
        )

    @property
    def epoch(self) -> int:
        """The number of the pass over the data that the next batch belongs to."""
        return self._given_to.epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that the trainers of all ranks were given; negative while samples that the last epoch
        carried over are left."""
        return self._given_to.position

    def __len__(self) -> int:
        """Batches of an epoch to which nothing was carried over."""
        return len(self._sampler)

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and position at the last boundary, in samples over all ranks, and what they are valid for."""
        sampler = self._sampler
        return {
            "unit": "samples",
            "position": self._settled.position,
            "epoch": self._settled.epoch,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "samples": sampler.samples,
            "drop_last": sampler.drop_last,
            "world": sampler.world,
            "batch_size": sampler.batch_size,
            "accumulation": self._accumulation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the state was taken; what is not as it was then is logged and added to ``changes``.

        Raises :class:`UsageError` while an iterator is alive, whose workers have fetched from the old position, and
        :class:`MismatchError` where the state is for another number of samples or another kind of order.
        """
        self._must_be_idle()
        state, sampler = as_state(state), self._sampler
        check_field(state, "unit", "samples")
        check_field(state, "samples", sampler.samples, "its positions count in another order; a new run starts anew")
        check_field(state, "shuffle", sampler.shuffle)
        seed, epoch, position = (state.get(field) for field in ("seed", "epoch", "position"))
        if not (isinstance(seed, int) and isinstance(epoch, int) and isinstance(position, int)):
            raise MismatchError("the loader's state has no seed, epoch and position")
        if epoch < 0 or not -epoch * sampler.samples <= position <= sampler.samples:
            raise MismatchError(f"the loader's state has position {position} of {sampler.samples} in epoch {epoch}")
        live = {
            "world": ("world", sampler.world),
            "batch_size": ("batch", sampler.batch_size),
            "accumulation": ("accumulation", self._accumulation),
            "drop_last": ("drop_last", sampler.drop_last),
        }
        changes = changed(state, live)
        if seed != sampler.seed:
            changes.append(f"seed {seed} as saved, not {sampler.seed}")
        self._note(changes, f"position {position} of epoch {epoch} in all")
        sampler.seed = seed
        self._go(Cursor(epoch, position))

    def _batches(self, start: Cursor) -> Iterator[tuple[Any, Cursor]]:
        self._generator.manual_seed(mixed(self._sampler.seed, *start, -1))
        self._sampler.cursor = cursor = start
        for batch in self._loader:
            cursor = self._sampler.after(cursor)
            yield batch, cursor

    def _next(self, end: Cursor) -> Cursor:
        return self._sampler.next_epoch(end)


class _Seeding(Dataset[Any]):
    """The dataset, with the generators of a worker process seeded for each sample."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, item: Item) -> Any:
        index, seed = item
        seed_worker(seed)
        return self._dataset[index]
