"""Reading ranges, tensors and records: exactly the bytes, or an error that names the object."""

from __future__ import annotations

import asyncio
import random

import pytest

from ckptd.checkpoint import reader as reader_module
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.tensors import find_tensor, of_index, read_region
from ckptd.errors import AccessDenied, IntegrityError, NoCheckpoint, Unavailable, UsageError
from ckptd.format import index
from ckptd.format.keys import LEASES, Version, tombstone_key
from ckptd.format.records import Box, Span, Tombstone, encode
from ckptd.limits import MIB
from ckptd.storage import ObjectInfo, Source
from ckptd_backends.wrappers.base import Wrapper
from tests.checkpoint.builder import (
    Held,
    State,
    flip,
    keys_of,
    make_checkpoint,
    make_run,
    only_key,
    open_generation,
    pattern,
    tamper,
    tensor,
)


class Counting(Wrapper):
    """Remembers what was read, and how many reads were open at once; or refuses what it is told to."""

    def __init__(self, inner: Run) -> None:
        super().__init__(inner.backend)
        self.bytes_read = 0
        self.gets: list[str] = []
        self.open = self.most_open = 0
        self.refuse: type[Exception] | None = None

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        self.gets.append(key)
        return await super().get(key, limit_bytes=limit_bytes)

    async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        if self.refuse is not None:
            raise self.refuse("no")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.bytes_read += out.nbytes
        await super().read_into(key, out, offset=offset)
        self.open -= 1

    async def put(self, key: str, data: bytes | memoryview | Source, *, if_absent: bool = False) -> ObjectInfo:
        if self.refuse is AccessDenied:
            raise AccessDenied("read-only")
        return await super().put(key, data, if_absent=if_absent)


async def _one(run: Run, *states: State) -> Version:
    version = Version(10, await open_generation(run, world=len(states)))
    await make_checkpoint(run, version, states)
    return version


async def test_any_range_is_exact(run: Run) -> None:
    version = await _one(
        run, State([tensor("a", (5 * MIB // 4 + 3,)), tensor("b", (17,), dtype="int8"), tensor("c", (0, 4))])
    )
    async with await CheckpointReader.open(run, version) as reader:
        receipt, _, layout = await reader.receipt(0)
        whole = await run.backend.get(receipt.shard.key, limit_bytes=1 << 30)
        out = bytearray(layout.shard_bytes)
        seen: list[int] = []
        await reader.read_shard(0, memoryview(out), on_bytes=seen.append)
        assert out == whole
        assert sum(seen) == len(whole)
        edges = [
            0,
            1,
            4095,
            4096,
            4097,
            4096 + MIB - 1,
            4096 + MIB,
            4096 + MIB + 1,
            4096 + 5 * MIB,
            len(whole) - 17,
            len(whole),
        ]
        ranges = [(a, b) for a in edges for b in edges if a <= b]
        ranges += [tuple(sorted(random.Random(7).choices(range(len(whole)), k=2))) for _ in range(5)]  # type: ignore[misc]
        for start, stop in ranges:
            part = bytearray(stop - start)
            await reader.read(0, start, stop, memoryview(part))
            assert part == whole[start:stop], (start, stop)


async def test_a_slice_reads_its_blocks_only(run: Run) -> None:
    version = await _one(run, State([tensor("a", (8 * MIB // 4,))]))
    counting = Counting(run)
    async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
        found = await find_tensor(reader, "a", 0)
        assert found is not None
        out = bytearray(40)
        await read_region(reader, found, region(found.shape, Span(10, 20)), memoryview(out))
        assert out == pattern(8 * MIB)[40:80]
        assert counting.bytes_read == MIB


async def test_reads_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.checkpoint.shard_map.WINDOW_BYTES", MIB)
    monkeypatch.setattr(reader_module, "WINDOWS_IN_FLIGHT_MAX", 3)
    monkeypatch.setattr(Counting, "capabilities", run.backend.capabilities.__class__(True, 8, 4096, False))
    version = await _one(run, State([tensor("a", (9 * MIB // 4,))]))
    counting = Counting(run)
    async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
        await asyncio.gather(reader.check_shard(0), reader.check_shard(0))
    assert counting.most_open == 3


async def test_wrong_requests_are_refused(run: Run) -> None:
    (version,) = await make_run(run, [10])
    async with await CheckpointReader.open(run, version) as reader:
        for start, stop, size in ((0, 10, 9), (-1, 3, 4), (5, 4, 0), (0, 1 << 40, 4)):
            with pytest.raises(UsageError):
                await reader.read(0, start, stop, memoryview(bytearray(size)))
        with pytest.raises(UsageError, match="writable"):
            await reader.read(0, 0, 4, memoryview(bytes(4)))
        with pytest.raises(UsageError, match="ranks 0 to 0"):
            await reader.receipt(1)


@pytest.mark.parametrize("error", [AccessDenied, Unavailable])
async def test_cannot_tell_is_not_damage(run: Run, error: type[Exception]) -> None:
    (version,) = await make_run(run, [10])
    counting = Counting(run)
    async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
        counting.refuse = error
        with pytest.raises(error):
            await reader.check_shard(0)


# Index


async def test_find_in_parts_loads_only_the_part(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", 10)
    monkeypatch.setattr(index, "INDEX_PART_BYTES_TARGET", 400)
    names = [f"t{i:03d}" for i in range(0, 60, 2)]
    version = await _one(run, State([tensor(name, (2,)) for name in names]))
    counting = Counting(run)
    async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
        assert len(reader.manifest.index_parts) > 5
        assert [entry.name async for entry in reader.entries()] == names
        counting.gets.clear()
        fresh = await CheckpointReader.open(Run(counting, run.id), version)
        counting.gets.clear()
        found = await fresh.find("t024")
        assert found is not None
        assert found.name == "t024"
        assert len(counting.gets) == 1
        for missing in ("", "t023", "t999", "t0235"):
            assert await fresh.find(missing) is None
        for name in names:
            entry = await fresh.find(name)
            assert entry is not None
            assert entry.name == name
    key = (await keys_of(run.backend, f"checkpoints/{version}/"))[0]
    assert key.endswith("index-00000.json")
    await tamper(run.backend, key, flip(b'"shape":['))
    async with await CheckpointReader.open(run, version) as reader:
        with pytest.raises(IntegrityError, match=r"index-00000\.json differs from the digest"):
            await reader.find("t000")


async def test_find_inline(run: Run) -> None:
    version = await _one(run, State([tensor(name, (2,)) for name in ("b", "a", "d")]))
    async with await CheckpointReader.open(run, version) as reader:
        assert [entry.name async for entry in reader.entries()] == ["a", "b", "d"]
        for name in ("a", "b", "d"):
            assert await reader.find(name) is not None
        for name in ("", "c", "e", "aa"):
            assert await reader.find(name) is None


# Tensors over ranks


async def test_boxes_and_ranges_come_together(run: Run) -> None:
    rows, columns = 64, 48
    whole = pattern(rows * columns * 4)

    def cut(box: Box) -> bytes:
        (top, left), (height, width) = box.offsets, box.lengths
        return b"".join(
            whole[(r * columns + left) * 4 : (r * columns + left + width) * 4] for r in range(top, top + height)
        )

    boxes = [Box((0, 0), (40, 20)), Box((40, 0), (24, 20)), Box((0, 20), (64, 28))]
    flat = pattern(100)
    states = [
        State(
            [
                Held("m", (rows, columns), cut(box), box=box),
                Held("f", (25,), flat[r * 32 : (r + 1) * 32], span=Span(r * 8, min(r * 8 + 8, 25)))
                if r < 2
                else Held("f", (25,), flat[64:], span=Span(16, 25)),
                Held("none", (4,), pattern(16) if r == 1 else None),
                tensor("own", (3,), salt=r, per_rank=True),
            ],
            aliases={"tied": "m"},
        )
        for r, box in enumerate(boxes)
    ]
    version = await _one(run, *states)
    async with await CheckpointReader.open(run, version) as reader:
        for name, data in (("m", whole), ("tied", whole), ("f", flat), ("none", pattern(16))):
            found = await find_tensor(reader, name, None)
            assert found is not None
            out = bytearray(len(data))
            await read_region(reader, found, region(found.shape), memoryview(out))
            assert out == data, name
        part = Box((30, 15), (20, 10))
        out = bytearray(20 * 10 * 4)
        entry = await reader.find("m")
        assert entry is not None
        await read_region(reader, of_index(entry), region((rows, columns), part), memoryview(out))
        assert out == cut(part)
        assert await find_tensor(reader, "own", None) is None
        for rank in range(3):
            own = await find_tensor(reader, "own", rank)
            assert own is not None
            out = bytearray(12)
            await read_region(reader, own, region(own.shape), memoryview(out))
            assert out == pattern(12, rank)


# Leases


async def test_reader_holds_a_lease_and_gives_it_back(run: Run) -> None:
    (version,) = await make_run(run, [10])
    async with await CheckpointReader.open(run, version, holder="me"):
        (key,) = await keys_of(run.backend, LEASES)
        assert key.startswith(f"{LEASES}reader-{version}-")
    assert await keys_of(run.backend, LEASES) == []


async def test_long_reads_renew_the_lease(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (version,) = await make_run(run, [10])
    async with await CheckpointReader.open(run, version, holder="me") as reader:
        before = await keys_of(run.backend, LEASES)
        await reader.check_shard(0)
        assert await keys_of(run.backend, LEASES) == before
        monkeypatch.setattr("ckptd.checkpoint.leases.LEASE_SECONDS", 0.0)
        await reader.check_shard(0)
        renewed = await keys_of(run.backend, LEASES)
        assert renewed[-1] > before[-1]
        assert len(renewed) <= 2
    assert await keys_of(run.backend, LEASES) == []


async def test_a_read_only_store_can_be_read(run: Run) -> None:
    (version,) = await make_run(run, [10])
    denied = Counting(run)
    denied.refuse = AccessDenied
    async with await CheckpointReader.open(Run(denied, run.id), version, holder="me") as reader:
        denied.refuse = None
        await reader.check_shard(0)


async def test_what_is_being_deleted_is_not_opened(run: Run) -> None:
    (version,) = await make_run(run, [10])
    await run.backend.put(tombstone_key(version), encode(Tombstone(reason="old", version=str(version))))
    with pytest.raises(NoCheckpoint, match="is being deleted"):
        await CheckpointReader.open(run, version, holder="me")
    assert await keys_of(run.backend, LEASES) == []
    with pytest.raises(NoCheckpoint):
        await CheckpointReader.open(run, Version(11, 1), holder="me")
    assert await keys_of(run.backend, LEASES) == []


async def test_a_damaged_block_names_its_tensor(run: Run) -> None:
    (version,) = await make_run(run, [10])
    key = await only_key(run.backend, f"checkpoints/{version}/", ".safetensors")
    await tamper(run.backend, key, flip(-1))
    async with await CheckpointReader.open(run, version) as reader:
        with pytest.raises(IntegrityError, match=r"of tensor 'model/bias', differ from their digest") as error:
            await reader.check_shard(0)
        assert key in error.value.message
        out = bytearray(4096)
        await reader.read(0, 0, 4096, memoryview(out))  # the rest is fine
