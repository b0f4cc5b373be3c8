"""Fetching over real storage: the bytes and requests that the plan promises, every element in its place, and nothing
that did not verify."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint import fetch as core
from ckptd.checkpoint.fetch import scatter_bytes
from ckptd.checkpoint.forecast import Sharding, forecast, total
from ckptd.checkpoint.plan import ReadPlan, Want, make_plan, stage
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import Slab, region, slabs
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.shard_map import WINDOW_BYTES
from ckptd.errors import IntegrityError, UsageError
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.keys import Version
from ckptd.format.records import Box, Span
from ckptd.limits import MIB
from ckptd.storage import open_backend
from ckptd_backends.wrappers import Traced
from ckptd_client import fetch as fetching
from ckptd_client.dtypes import torch_dtype
from ckptd_client.fetch import fetch, scatter
from tests.checkpoint.builder import (
    Held,
    State,
    chunk,
    cut,
    flip,
    grid,
    make_checkpoint,
    numbered,
    open_generation,
    part_of,
    tamper,
    tensor,
)

Shape = tuple[int, ...]
Part = Box | Span | None


@dataclass
class Stored:
    """A checkpoint on disk, and a count of what is read of it."""

    run: Run
    reader: CheckpointReader
    traced: Traced

    async def want(self, name: str, part: Part = None) -> Want:
        entry = await self.reader.find(name)
        assert entry is not None
        wanted = region(entry.shape, part)
        pieces = tuple(await self.reader.locate(name, wanted))
        return Want(name=name, dtype=entry.dtype, shape=entry.shape, region=wanted, pieces=pieces)

    async def plan(self, wanted: Sequence[tuple[str, Part]]) -> tuple[list[Want], ReadPlan]:
        wants, _ = stage([await self.want(name, part) for name, part in wanted])
        ranks = {piece.rank for want in wants for piece in want.pieces}
        return wants, make_plan(wants, {rank: await self.reader.block_bytes(rank) for rank in ranks})

    async def fetch(self, wanted: Sequence[tuple[str, Part]]) -> tuple[list[bytes], ReadPlan]:
        """The bytes of each part; what the store was asked for is exactly what the plan says."""
        wants, plan = await self.plan(wanted)
        out = memoryview(bytearray(b"\xdd" * plan.target_bytes))
        count = self.traced.counts["read_into"]
        calls, size = count.calls, count.size_bytes
        done = await fetch(self.reader, plan, out)
        assert (count.calls - calls, count.size_bytes - size) == (plan.requests, plan.bytes_read)
        assert (done.requests, done.bytes_read) == (plan.requests, plan.bytes_read)
        assert done.seconds >= 0
        return [bytes(out[want.target : want.target + want.size_bytes]) for want in wants], plan

    async def check(self, wanted: Sequence[tuple[str, Part]], dtype: str = "int32") -> ReadPlan:
        """Fetch parts of numbered tensors, and compare every element."""
        found, plan = await self.fetch(wanted)
        for data, (name, part) in zip(found, wanted, strict=True):
            entry = await self.reader.find(name)
            assert entry is not None
            assert data == cut(numbered(entry.shape, dtype), entry.shape, dtype, part), (name, part)
        return plan


Save = Callable[[Sequence[Sequence[Held]]], AbstractAsyncContextManager[Stored]]


@pytest.fixture
def save(tmp_run: str) -> Save:
    """Writes a checkpoint of what each rank holds, and opens it."""

    @asynccontextmanager
    async def make(ranks: Sequence[Sequence[Held]]) -> AsyncIterator[Stored]:
        async with aclosing(Traced(open_backend(tmp_run))) as traced:
            run = await Run.open(traced, create=True)
            version = Version(10, await open_generation(run, world=len(ranks)))
            await make_checkpoint(run, version, [State(held) for held in ranks])
            async with await CheckpointReader.open(run, version) as reader:
                yield Stored(run, reader, traced)

    return make


def rows(shape: Shape, number: int, count: int) -> Box:
    start, length = chunk(shape[0], number, count)
    return Box((start, *(0 for _ in shape[1:])), (length, *shape[1:]))


# Every layout into every other


@pytest.mark.parametrize("saving", range(1, 7))
async def test_r112_any_split_of_rows_is_read_as_any_other(save: Save, saving: int) -> None:
    shapes = {f"m/{size}": (size, 3) for size in range(10)}
    ranks = [
        [part_of(name, shape, rows(shape, rank, saving)) for name, shape in shapes.items()] for rank in range(saving)
    ]
    async with save(ranks) as stored:
        for restoring in range(1, 7):
            for rank in range(restoring):
                await stored.check([(name, rows(shape, rank, restoring)) for name, shape in shapes.items()])


async def test_r113_an_uneven_grid_is_read_as_any_other(save: Save) -> None:
    shape = (5, 7)
    async with save([[part_of("m", shape, box)] for box in grid(shape, (2, 3))]) as stored:
        for counts in product(range(1, 6), range(1, 8)):
            await stored.check([("m", box) for box in grid(shape, counts)])


async def test_flat_ranges_are_read_as_boxes_and_the_reverse(save: Save) -> None:
    shape = (4, 3, 5)
    spans = [Span(0, 7), Span(7, 31), Span(31, 31), Span(31, 60)]
    boxes = grid(shape, (2, 1, 2))
    ranks = [
        [part_of("by/span", shape, span), part_of("by/box", shape, box)] for span, box in zip(spans, boxes, strict=True)
    ]
    async with save(ranks) as stored:
        for counts in product(range(1, 5), range(1, 4), range(1, 6)):
            await stored.check([("by/span", box) for box in grid(shape, counts)])
        await stored.check([(name, Span(a, b)) for name in ("by/span", "by/box") for a in range(60) for b in (a, 60)])


@pytest.mark.parametrize("dtype", ITEM_BYTES)
async def test_every_dtype_comes_bit_for_bit(save: Save, dtype: str) -> None:
    shape = (9, 5)
    ranks = [[part_of("m", shape, box, dtype=dtype)] for box in grid(shape, (1, 2))]
    ranks[0] += [part_of("scalar", (), None, dtype=dtype), part_of("none", (0, 3), None, dtype=dtype)]
    async with save(ranks) as stored:
        await stored.check([("m", box) for box in grid(shape, (3, 1))] + [("scalar", None), ("none", None)], dtype)
        wants, plan = await stored.plan([("scalar", None), ("m", Box((0, 1), (9, 3)))])
        out = memoryview(bytearray(plan.target_bytes))
        await fetch(stored.reader, plan, out)
        want, item = wants[1], ITEM_BYTES[dtype]
        data = torch.frombuffer(out, dtype=torch.uint8)[want.target : want.target + want.size_bytes]
        assert data.view(torch_dtype(dtype)).view(9, 3).dtype == torch_dtype(dtype)  # where it lies, without a copy
        whole = torch.frombuffer(bytearray(numbered(shape, dtype)), dtype=torch.uint8).view(9, 5, item)
        assert torch.equal(data.view(9, 3, item), whole[:, 1:4])


# Copying


@st.composite
def lattices(draw: st.DrawFn) -> list[Slab]:
    """Slabs of the intersections of boxes, of items of any width, at any place."""
    dims = draw(st.integers(1, 4))
    offsets = st.tuples(*[st.integers(0, 3)] * dims)
    boxes = [Box(draw(offsets), draw(st.tuples(*[st.integers(1, 6)] * dims))) for _ in range(2)]
    item = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    regions = [region((9,) * dims, box) for box in boxes]
    return slabs(regions[0], regions[1], item, draw(st.integers(0, 40)), draw(st.integers(0, 40)))


@given(lattices(), st.integers(0, 3), st.integers(0, 3))
def test_torch_copies_the_same_bytes_as_python(parts: list[Slab], source_shift: int, target_shift: int) -> None:
    source = memoryview(bytearray(random.Random(3).randbytes(6**4 * 16 + 50)))[source_shift:]
    plain, quick = (memoryview(bytearray(len(source) + 7))[target_shift:] for _ in range(2))
    scatter_bytes(parts, source, plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "PLAIN_COPY_BYTES_MAX", 0)
        scatter(parts, source, quick)
    assert quick == plain
    again = memoryview(bytearray(len(plain)))
    scatter(parts, source, again)
    assert again == plain


async def test_columns_of_many_rows_come_into_place(save: Save) -> None:
    shape = (3000, 1024)
    whole = random.Random(5).randbytes(element_count(shape) * 4)
    as_int = torch.frombuffer(bytearray(whole), dtype=torch.int32).view(shape)
    async with save([[Held("m", shape, whole, "float32")]]) as stored:
        for left, width in ((0, 256), (255, 3), (1023, 1)):
            ((data,), plan) = await stored.fetch([("m", Box((17, left), (2900, width)))])
            assert plan.bytes_read <= len(whole)
            got = torch.frombuffer(bytearray(data), dtype=torch.int32).view(2900, width)
            assert torch.equal(got, as_int[17:2917, left : left + width])


async def test_all_of_a_shard_is_read_straight_into_place(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        pytest.fail("copied what could have been read into place")

    monkeypatch.setattr(fetching, "scatter", never)
    held = [tensor(f"m/{i}", (i, 7), dtype="int8", salt=i) for i in range(40)]
    held += [tensor(f"o/{i}", (i + 1, 300_000), dtype="float64", salt=i) for i in range(4)]
    held += [tensor(f"b/{i}", (3, i), dtype="bfloat16", salt=i) for i in range(40)]
    async with save([held, [tensor("m/0", (0, 7), dtype="int8"), tensor("own", (3,), salt=9)]]) as stored:
        found, plan = await stored.fetch([(one.name, None) for one in held[1:]])
        assert found == [one.data for one in held[1:]]
        assert plan.bytes_read == plan.bytes_wanted == plan.target_bytes
        assert plan.requests <= plan.bytes_read // (WINDOW_BYTES - MIB) + 1
        assert [shard.rank for shard in plan.shards] == [0]


async def test_what_is_wanted_twice_comes_to_both_places(save: Save) -> None:
    async with save([[part_of("m", (40, 3), None)]]) as stored:
        plan = await stored.check([("m", None), ("m", rows((40, 3), 1, 2)), ("m", None)])
        assert (plan.bytes_read, plan.bytes_wanted) == (480, 1200)


async def test_a_forecast_says_what_a_fetch_then_reads(save: Save) -> None:
    shapes: dict[str, Shape] = {"m/big": (40, 100_003), "m/scalar": (), "m/small": (7, 3), "o/wide": (3, 500_000)}
    ranks = [
        [tensor("m/scalar", ()) if rank == 0 else Held("m/scalar", (), None)]
        + [
            Held(name, shape, bytes(4 * element_count(rows(shape, rank, 3).lengths)), box=rows(shape, rank, 3))
            for name, shape in shapes.items()
            if shape
        ]
        + [Held("o/own", (5,), bytes([rank]) * 20, per_rank=True)]
        for rank in range(3)
    ]
    async with save(ranks) as stored:
        for world, sharding in product((1, 2, 4), Sharding):
            parts = {
                name: rows(shape, 0, world) if sharding is Sharding.ROWS and shape else None
                for name, shape in shapes.items()
            }
            _, plan = await stored.fetch(list(parts.items()))
            costs = await forecast(stored.reader, world, sharding)
            assert len(costs) == world
            assert (costs[0].bytes_wanted, costs[0].bytes_read) == (plan.bytes_wanted, plan.bytes_read)
            assert (costs[0].requests, costs[0].shards) == (plan.requests, len(plan.shards))
        same = total(await forecast(stored.reader, 3, Sharding.ROWS))
        size = sum(4 * element_count(shape) for shape in shapes.values())
        assert same.bytes_wanted == size + 2 * 4 + 3 * 20  # the scalar for each, and what is each one's own
        (own, *_) = await forecast(stored.reader, 3, Sharding.ROWS, only="o/own")
        assert (own.bytes_wanted, own.shards) == (20, 1)


# Bounds and damage


class Watched:
    """A reader that counts what is open at once, and sees to it that no window is read into by two."""

    def __init__(self, reader: CheckpointReader, out: memoryview) -> None:
        self._reader = reader
        self._out = out.obj
        self._windows: list[object] = []
        self.open = self.most_open = 0

    async def read(self, rank: int, start: int, stop: int, out: memoryview) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if out.obj is not self._out:
            assert not any(out.obj is window for window in self._windows), "a window is used twice at once"
            self._windows.append(out.obj)
        await asyncio.sleep(0.01)
        await self._reader.read(rank, start, stop, out)
        self._windows = [window for window in self._windows if window is not out.obj]
        self.open -= 1


async def test_windows_in_flight_are_bounded(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(bytearray):
        def __init__(self, size: int) -> None:
            made.append(size)
            super().__init__(size)

    monkeypatch.setattr(core, "bytearray", Counted, raising=False)
    shape = (12, 3 * MIB)
    data = random.Random(1).randbytes(element_count(shape))
    async with save([[Held("m", shape, data, "uint8")]]) as stored:
        wants, plan = await stored.plan([("m", Box((0, 5), (12, 3 * MIB - 9)))])
        assert plan.requests > 4
        out = memoryview(bytearray(plan.target_bytes))
        watched = Watched(stored.reader, out)
        await fetch(watched, plan, out, windows_max=2)
        rest = b"".join(data[row * shape[1] + 5 : (row + 1) * shape[1] - 4] for row in range(12))
        assert out[wants[0].target :] == rest
        assert watched.most_open == 2
        assert made == [WINDOW_BYTES] * 2


async def test_a_damaged_block_is_named_and_raises(save: Save) -> None:
    shape = (6, MIB)
    ranks = [[tensor("m/a", (9,), salt=1), part_of_bytes("m/w", shape, rows(shape, rank, 3))] for rank in range(3)]
    ranks[1][0] = ranks[2][0] = Held("m/a", (9,), None)
    async with save(ranks) as stored:
        wanted: list[tuple[str, Part]] = [("m/w", Box((0, 7), (6, 100))), ("m/a", None)]
        await stored.fetch(wanted)
        key = (await stored.reader.receipt(1)).receipt.shard.key
        await tamper(stored.run.backend, key, flip(4096 + 50))
        with pytest.raises(IntegrityError, match=r"of tensor 'm/w', differ from their digest") as error:
            await stored.fetch(wanted)
        assert key in error.value.message
        assert (await stored.fetch([("m/a", None)]))[0] == [tensor("m/a", (9,), salt=1).data]
        await stored.run.backend.delete([key])
        with pytest.raises(IntegrityError, match="is missing, though the manifest promises it"):
            await stored.fetch(wanted)


def part_of_bytes(name: str, shape: Shape, box: Box) -> Held:
    """Whole rows of a tensor of bytes."""
    data = random.Random(box.offsets[0]).randbytes(element_count(box.lengths))
    return Held(name, shape, data, "uint8", box=box)


async def test_memory_that_does_not_hold_the_plan_is_refused(save: Save) -> None:
    async with save([[part_of("m", (5,), None)]]) as stored:
        _, plan = await stored.plan([("m", None)])
        for out in (memoryview(bytearray(19)), memoryview(bytes(20)), memoryview(bytearray(40))[::2]):
            with pytest.raises(UsageError, match="the plan needs 20 bytes"):
                await fetch(stored.reader, plan, out)
        assert (await fetch(stored.reader, make_plan([], {}), memoryview(bytearray()))).requests == 0
