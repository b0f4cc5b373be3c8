"""What a restore by some number of ranks would read of a checkpoint: the figures of its plans, without reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptd.checkpoint.plan import ReadPlan, Want, make_plan
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import Region, region
from ckptd.checkpoint.tensors import of_rank
from ckptd.errors import UsageError
from ckptd.format.records import Box, IndexEntry


class Sharding(StrEnum):
    """How the ranks that restore hold each tensor."""

    ROWS = "rows"
    """Cut along its first dimension into chunks as long as the first, as far as they go; a scalar is on every rank."""
    REPLICATED = "replicated"
    """All of it on every rank."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one rank's restore, or of several together."""

    bytes_wanted: int
    bytes_read: int
    requests: int
    shards: int
    """Opened; by several ranks, as often as they do."""

    @property
    def amplification(self) -> float | None:
        """Bytes read for each byte wanted; nothing where none is wanted."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else None


def total(costs: Sequence[Cost]) -> Cost:
    """Of all of them together."""
    return Cost(
        sum(cost.bytes_wanted for cost in costs),
        sum(cost.bytes_read for cost in costs),
        sum(cost.requests for cost in costs),
        sum(cost.shards for cost in costs),
    )


def rows(shape: tuple[int, ...], rank: int, world: int) -> Region:
    """A rank's rows of a tensor."""
    if not shape:
        return region(shape)
    chunk = -(-shape[0] // world)
    start = min(rank * chunk, shape[0])
    return region(shape, Box((start, *(0 for _ in shape[1:])), (min(chunk, shape[0] - start), *shape[1:])))


async def forecast(reader: CheckpointReader, world: int, sharding: Sharding, *, only: str | None = None) -> list[Cost]:
    """What each of ``world`` ranks would read. ``only``: a part of the state, or a name and what is below it.

    What is one rank's own counts where the number of ranks stays as it was saved; elsewhere nobody reads it as it is.
    Raises :class:`UsageError` where ``only`` is no tensor's name, and what the reader raises.
    """
    entries = [entry async for entry in reader.entries() if _is_below(entry.name, only)]
    same = world == reader.manifest.world
    alike = sharding is Sharding.REPLICATED and not same
    blocks: dict[int, int] = {}
    costs: list[Cost] = []
    any_wanted = bool(entries)
    for rank in range(1 if alike else world):
        own = await _own(reader, rank, only) if same else []
        owned = {want.name for want in own}  # each rank takes its own up again, also where all are equal
        wants = own + [await _share(reader, e, rank, world, sharding) for e in entries if e.name not in owned]
        any_wanted |= bool(wants)
        for holder in {piece.rank for want in wants for piece in want.pieces} - blocks.keys():
            blocks[holder] = await reader.block_bytes(holder)
        costs.append(_cost(make_plan(wants, blocks)))
    if only is not None and not any_wanted:
        raise UsageError(
            f"no tensor that {world} ranks would read is called {only!r} or lies below it",
            hint=f"the parts are {', '.join(reader.manifest.parts)}",
        )
    return costs * world if alike else costs


async def _share(reader: CheckpointReader, entry: IndexEntry, rank: int, world: int, sharding: Sharding) -> Want:
    wanted = rows(entry.shape, rank, world) if sharding is Sharding.ROWS else region(entry.shape)
    pieces = tuple(await reader.locate(entry.name, wanted)) if wanted.element_count else ()
    return Want(name=entry.name, dtype=entry.dtype, shape=entry.shape, region=wanted, pieces=pieces)


async def _own(reader: CheckpointReader, rank: int, only: str | None) -> list[Want]:
    """All that a rank saved as its own."""
    layout = (await reader.receipt(rank)).layout
    tensors = [of_rank(entry, rank) for entry in layout.tensors if entry.per_rank and _is_below(entry.name, only)]
    return [
        Want(name=t.name, dtype=t.dtype, shape=t.shape, region=region(t.shape), pieces=t.own or ()) for t in tensors
    ]


def _is_below(name: str, only: str | None) -> bool:
    return only is None or name == only or name.startswith(f"{only}/")


def _cost(plan: ReadPlan) -> Cost:
    return Cost(plan.bytes_wanted, plan.bytes_read, plan.requests, len(plan.shards))
