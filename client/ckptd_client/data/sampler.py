"""One order of samples for the whole world, and the batches that a rank takes of it. Nothing is read here."""

# torch leaves types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch.utils.data import Sampler

from ckptd.errors import UsageError
from ckptd_client.data.seeds import mixed

Item = tuple[int, int]
"""What the sampler asks the dataset for: an index, and the seed for whatever is drawn while it is made."""


class Cursor(NamedTuple):
    """Where all ranks together are."""

    epoch: int = 0
    position: int = 0
    """Samples of the epoch that were given. Negative while samples that the epoch before carried over are left."""


class ResumableSampler(Sampler[list[Item]]):
    """The batches of one rank, from a position in an epoch on.

    Each step takes ``batch_size * world`` samples of the order, ``batch_size`` for each rank. Every rank gets the same
    number of batches, and the order does not depend on how it is cut:

    - The last step of an epoch takes what is left, at least one sample for each rank; the step before it leaves it
      so many where it can.
    - Where fewer samples than ranks remain all the same, they are carried over: the next epoch begins with them.
    - With ``drop_last`` the epoch ends where less than a whole step remains, and that rest is left out.
    """

    def __init__(
        self, samples: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool, rank: int, world: int
    ) -> None:
        """Raises :class:`UsageError` for sizes below one, a rank outside the world, and a step of which ``drop_last``
        would leave nothing."""
        if batch_size < 1 or samples < 1 or not 0 <= rank < world:
            raise UsageError(f"{samples} samples in batches of {batch_size} for rank {rank} of {world}")
        if drop_last and samples < batch_size * world:
            raise UsageError(
                f"drop_last leaves nothing of {samples} samples: a step of {world} ranks takes {batch_size * world}",
                hint="make the batches smaller, or leave drop_last out",
            )
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.world = world
        self.cursor = Cursor()
        """Where the next iteration begins."""
        self._rank = rank

    def stride(self, position: int) -> int:
        """How many samples all ranks together take at the next step; 0 at the end of the epoch."""
        whole = self.batch_size * self.world
        left = self.samples - position
        if left < whole:
            return 0 if self.drop_last or left < self.world else left
        too_few = 0 < left - whole < self.world
        return left - self.world if too_few and self.batch_size > 1 and not self.drop_last else whole

    def after(self, cursor: Cursor) -> Cursor:
        """Where the next step ends."""
        return cursor._replace(position=cursor.position + self.stride(cursor.position))

    def next_epoch(self, cursor: Cursor) -> Cursor:
        """Where the next epoch begins when this one ends at the cursor."""
        return Cursor(cursor.epoch + 1, 0 if self.drop_last else cursor.position - self.samples)

    def __len__(self) -> int:
        """Batches for each rank of an epoch to which nothing was carried over."""
        steps, left = divmod(self.samples, self.batch_size * self.world)
        is_step = left >= self.world or (left and steps and self.batch_size > 1)
        return steps + (1 if is_step and not self.drop_last else 0)

    def __iter__(self) -> Iterator[list[Item]]:
        epoch, position = self.cursor
        orders: dict[int, torch.Tensor | None] = {}
        while taken := self.stride(position):
            first = position + taken * self._rank // self.world
            last = position + taken * (self._rank + 1) // self.world
            items: list[Item] = []
            while first < last:  # an epoch in each round: this one, after what earlier ones left
                passes, at = divmod(first, self.samples)
                end = min(at + last - first, self.samples)
                if epoch + passes not in orders:
                    orders = {epoch + passes: self._order(epoch + passes)}
                items += self._items(epoch + passes, orders[epoch + passes], at, end)
                first += end - at
            yield items
            position += taken

    def _items(self, epoch: int, order: torch.Tensor | None, first: int, last: int) -> list[Item]:
        indices = range(first, last) if order is None else cast("list[int]", order[first:last].tolist())
        return [(index, mixed(self.seed, epoch, place)) for place, index in enumerate(indices, first)]

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(mixed(self.seed, epoch)))
