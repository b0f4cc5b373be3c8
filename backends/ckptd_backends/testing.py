"""The promises of :class:`ckptd.storage.Backend` as tests, for every backend and every wrapper.

A subclass says how to make a backend with a fresh root, and how to get at that root behind the backend's back::

    class TestMemory(BackendTests):
        def make(self) -> Backend: ...
        def raw_put(self, backend: Backend, key: str, data: bytes) -> None: ...
        def raw_names(self, backend: Backend) -> set[str]: ...

Needs pytest with pytest-asyncio in auto mode, and Hypothesis.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import tracemalloc
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.errors import AlreadyExists, NotFound, ShortRead, TooLarge, UsageError
from ckptd.limits import MIB
from ckptd.storage import Backend, ObjectInfo

HOSTILE_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "~a",
    "a b",
    "a\n",
    "a\0b",
    "ä",
    "a\\b",
    "x" * 201,
)
WAIT_SECONDS = 30.0
MODEL_KEYS = ("a", "a-b", "b/1", "b/2", "bb/1", "c/d/e")
"""None is another's prefix at a slash; ``a-b`` sorts before ``b/1``."""


def patterned(size: int, seed: int = 0) -> bytes:
    """``size`` bytes in which every part differs from every other."""
    return random.Random(seed).randbytes(size)


async def listed(backend: Backend, prefix: str = "") -> list[str]:
    """The keys of a scan."""
    return [info.key async for info in backend.scan(prefix)]


class Filling:
    """A source that becomes ready step by step, holds nothing longer than it must, and records what it was asked."""

    def __init__(
        self,
        data: bytes,
        *,
        fail_at: int | None = None,
        hang_at: int | None = None,
        at_completion: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._data = bytearray(len(data))
        self._final = data
        self._view = memoryview(self._data).toreadonly()
        self._fail_at = fail_at
        self._hang_at = hang_at
        self.asked: list[tuple[int, int]] = []
        self.completed = 0
        self._at_completion = at_completion
        self.started = asyncio.Event()
        self.hung = asyncio.Event()

    @property
    def view(self) -> memoryview:
        return self._view

    async def ready(self, start: int, stop: int) -> None:
        self.started.set()
        await asyncio.sleep(0)
        self.asked.append((start, stop))
        if self._hang_at is not None and start <= self._hang_at < stop:
            self.hung.set()
            await asyncio.Event().wait()
        if self._fail_at is not None and start <= self._fail_at < stop:
            raise Abandoned("the slot was voided")
        self._data[start:stop] = self._final[start:stop]

    def stored(self, start: int, stop: int) -> None:
        self._data[start:stop] = bytes(stop - start)  # whoever reads it now, reads something else

    async def complete(self) -> None:
        self.completed += 1
        if self._at_completion:
            await self._at_completion()


class Abandoned(Exception):
    """What a source raises to give a put up."""


class BackendTests(ABC):
    """Subclass and get the suite."""

    copies_data: ClassVar[bool] = False
    """Whether large puts may hold a copy of their data."""
    examples_max: ClassVar[int] = 30
    """How many histories the comparison with a dict tries."""

    @abstractmethod
    def make(self) -> Backend:
        """A backend with a root that nobody has used yet."""

    @abstractmethod
    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        """Store an object below the backend's root without the backend; ``key`` may be any name."""

    @abstractmethod
    def raw_names(self, backend: Backend) -> set[str]:
        """All that lies below the backend's root: objects, temporaries, uploads that were not completed."""

    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        """One backend, closed after the test."""
        backend = self.make()
        async with asyncio.timeout(WAIT_SECONDS):
            yield backend
            await backend.aclose()

    def part(self, backend: Backend) -> int:
        """The size of a part, which must be a multiple of a page."""
        assert backend.capabilities.part_bytes % 4096 == 0
        return backend.capabilities.part_bytes

    # Round trips

    async def test_small_objects_come_back(self, backend: Backend) -> None:
        for size in (0, 1, 4095, 4096, 65_537):
            data = patterned(size)
            info = await backend.put(f"runs/{size}/x.bin", data)
            assert (info.key, info.size_bytes) == (f"runs/{size}/x.bin", size)
            assert await backend.get(info.key, limit_bytes=size) == data
            out = bytearray(size)
            await backend.read_into(info.key, memoryview(out))
            assert out == data

    async def test_sizes_around_the_part(self, backend: Backend) -> None:
        for extra in (-1, 0, 1):
            data = patterned(self.part(backend) + extra)
            assert (await backend.put("x", memoryview(data))).size_bytes == len(data)
            out = bytearray(len(data))
            await backend.read_into("x", memoryview(out))
            assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest()

    async def test_many_parts_and_ranges_of_them(self, backend: Backend) -> None:
        part = self.part(backend)
        data = patterned(3 * part + 777)
        await backend.put("x", data)
        for start, stop in (
            (0, len(data)),
            (1, 2),
            (part - 1, part + 1),
            (4096, 2 * part + 5),
            (len(data) - 1, len(data)),
        ):
            out = bytearray(stop - start)
            await backend.read_into("x", memoryview(out), offset=start)
            assert out == data[start:stop], (start, stop)

    async def test_views_of_other_items_are_bytes(self, backend: Backend) -> None:
        numbers = memoryview(patterned(4096)).cast("q")
        await backend.put("x", numbers)
        out = memoryview(bytearray(4096)).cast("i")
        await backend.read_into("x", out)
        assert bytes(out) == bytes(numbers)

    async def test_put_over_an_object_replaces_it(self, backend: Backend) -> None:
        await backend.put("x", b"old")
        await backend.put("x", b"newer")
        assert await backend.get("x", limit_bytes=5) == b"newer"

    async def test_put_keeps_no_reference(self, backend: Backend) -> None:
        memory = bytearray(patterned(2 * self.part(backend)))
        before = bytes(memory)
        await backend.put("x", memoryview(memory))
        memory[:] = bytes(len(memory))
        memory.clear()  # raises BufferError while somebody holds a view
        assert await backend.get("x", limit_bytes=len(before)) == before

    async def test_a_read_keeps_no_reference(self, backend: Backend) -> None:
        """Not even in a cycle, which lives until Python looks for such: windows of many reads would pile up."""
        await backend.put("x", patterned(2 * self.part(backend)))
        memory = bytearray(2 * self.part(backend))
        gc.disable()
        try:
            await backend.read_into("x", memoryview(memory))
            memory.clear()
        finally:
            gc.enable()

    async def test_a_put_that_fails_keeps_no_reference(self, backend: Backend) -> None:
        await backend.put("x", b"first")
        memory = bytearray(2 * self.part(backend))
        with pytest.raises(AlreadyExists):
            await backend.put("x", memoryview(memory), if_absent=True)
        memory.clear()

    async def test_put_makes_no_copy(self, backend: Backend) -> None:
        if self.copies_data:
            return
        await backend.put("warm", b"up")
        data = memoryview(bytearray(max(4 * self.part(backend), 32 * MIB)))
        tracemalloc.start()
        try:
            await backend.put("x", data)
            assert tracemalloc.get_traced_memory()[1] < data.nbytes // 4
        finally:
            tracemalloc.stop()

    # Reads that cannot be

    async def test_what_is_not_there(self, backend: Backend) -> None:
        await backend.put("runs/1", b"x")
        for key in ("runs/2", "runs", "nowhere/at/all"):
            with pytest.raises(NotFound):
                await backend.get(key, limit_bytes=10)
            with pytest.raises(NotFound):
                await backend.head(key)
            with pytest.raises(NotFound):
                await backend.read_into(key, memoryview(bytearray(1)))
            with pytest.raises(NotFound):
                await backend.read_into(key, memoryview(bytearray()))

    async def test_get_never_truncates(self, backend: Backend) -> None:
        await backend.put("x", bytes(1000))
        with pytest.raises(TooLarge):
            await backend.get("x", limit_bytes=999)

    async def test_read_past_the_end_is_refused(self, backend: Backend) -> None:
        await backend.put("x", bytes(1000))
        for offset, size in ((0, 1001), (999, 2), (1000, 1), (5000, 1)):
            with pytest.raises(ShortRead):
                await backend.read_into("x", memoryview(bytearray(size)), offset=offset)
        await backend.read_into("x", memoryview(bytearray()), offset=1000)

    async def test_hostile_keys_are_refused(self, backend: Backend) -> None:
        for key in HOSTILE_KEYS:
            with pytest.raises(UsageError):
                await backend.put(key, b"x")
            with pytest.raises(UsageError):
                await backend.get(key, limit_bytes=1)
            with pytest.raises(UsageError):
                await backend.read_into(key, memoryview(bytearray(1)))
            with pytest.raises(UsageError):
                await backend.head(key)
            with pytest.raises(UsageError):
                await backend.delete([key])
        assert self.raw_names(backend) == set()

    # Conditional puts

    async def test_if_absent_twice(self, backend: Backend) -> None:
        await backend.put("x", b"first", if_absent=True)
        with pytest.raises(AlreadyExists):
            await backend.put("x", b"other", if_absent=True)
        assert await backend.get("x", limit_bytes=5) == b"first"

    async def test_if_absent_has_one_winner(self, backend: Backend) -> None:
        async def put(number: int) -> bool:
            try:
                await backend.put("m/commit.json", b"writer %02d" % number, if_absent=True)
            except AlreadyExists:
                return False
            return True

        won = await asyncio.gather(*map(put, range(20)))
        assert sum(won) == 1
        assert await backend.get("m/commit.json", limit_bytes=100) == b"writer %02d" % won.index(True)
        assert self.raw_names(backend) == {"m/commit.json"}

    # Sources that fill while they are read

    async def test_parts_are_asked_for_before_they_are_read(self, backend: Backend) -> None:
        for size in (10, 3 * self.part(backend) + 5):
            data = patterned(size)
            source = Filling(data)
            await backend.put("x", source)
            assert source.completed >= 1  # again, where the put was retried
            assert sum(stop - start for start, stop in set(source.asked)) == size
            out = bytearray(size)
            await backend.read_into("x", memoryview(out))
            assert out == data

    async def test_nothing_is_visible_before_completion(self, backend: Backend) -> None:
        for size in (10, 2 * self.part(backend)):
            seen: list[list[str]] = []

            async def look(seen: list[list[str]] = seen) -> None:
                seen.append(await listed(backend, "y/"))

            source = Filling(patterned(size), at_completion=look)
            await backend.put("y/x", source)
            assert seen == [[]]
            await backend.delete(["y/x"])

    async def test_a_source_that_gives_up_leaves_nothing(self, backend: Backend) -> None:
        size = 3 * self.part(backend)
        for source in (Filling(bytes(10), fail_at=5), Filling(bytes(size), fail_at=size - 1)):
            with pytest.raises(Abandoned):
                await backend.put("x", source)
            assert self.raw_names(backend) == set()

    async def test_a_cancelled_put_leaves_nothing(self, backend: Backend) -> None:
        size = 3 * self.part(backend)
        source = Filling(bytes(size), hang_at=size - 1)
        put = asyncio.create_task(backend.put("x", source))
        await source.hung.wait()
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert self.raw_names(backend) == set()
        await backend.put("x", b"later")
        assert await backend.get("x", limit_bytes=5) == b"later"

    async def test_a_reader_sees_old_or_new(self, backend: Backend) -> None:
        contents = [patterned(50_000, seed) for seed in range(2)]
        await backend.put("x", contents[0])

        async def write() -> None:
            for turn in range(10):
                await backend.put("x", contents[turn % 2])

        writing = asyncio.create_task(write())
        while not writing.done():
            assert await backend.get("x", limit_bytes=50_000) in contents
        await writing

    async def test_a_source_that_gives_up_at_the_end_leaves_nothing(self, backend: Backend) -> None:
        async def give_up() -> None:
            raise Abandoned("the slot was voided at the end")

        for size in (10, 3 * self.part(backend)):
            with pytest.raises(Abandoned):
                await backend.put("x", Filling(bytes(size), at_completion=give_up))
            assert self.raw_names(backend) == set()

    # Listing and deleting

    async def test_scan_is_sorted_and_bounded(self, backend: Backend) -> None:
        keys = ["a-", "a/b", "a/b-c", "a/c/d", "a0", "aa/b", "b", "a.txt"]
        for key in keys:
            await backend.put(key, key.encode())
        assert await listed(backend) == sorted(keys)
        assert await listed(backend, "a/") == ["a/b", "a/b-c", "a/c/d"]
        assert await listed(backend, "a/c/") == ["a/c/d"]
        assert await listed(backend, "b/") == []
        assert await listed(backend, "zzz/") == []
        sizes = {info.key: info.size_bytes async for info in backend.scan("")}
        assert sizes == {key: len(key) for key in keys}

    async def test_scan_takes_whole_segments_only(self, backend: Backend) -> None:
        for prefix in ("a", "/", "../", "a//", "~/", "ä/"):
            with pytest.raises(UsageError):
                await listed(backend, prefix)

    async def test_scan_leaves_foreign_names_out(self, backend: Backend) -> None:
        await backend.put("runs/x", b"1")
        self.raw_put(backend, "runs/~ckptd-1700000000-0123456789abcdef", b"a temporary")
        self.raw_put(backend, "runs/a note.txt", b"a person's")
        assert await listed(backend) == ["runs/x"]
        assert await listed(backend, "runs/") == ["runs/x"]

    async def test_objects_of_others_are_found(self, backend: Backend) -> None:
        self.raw_put(backend, "runs/x", b"written by another process")
        assert await listed(backend, "runs/") == ["runs/x"]
        assert await backend.get("runs/x", limit_bytes=100) == b"written by another process"

    async def test_deleting_while_scanning(self, backend: Backend) -> None:
        keys = [f"d/{number:03d}" for number in range(8)]
        for key in keys:
            await backend.put(key, b"x")
        seen: list[ObjectInfo] = []
        async for info in backend.scan("d/"):
            seen.append(info)
            await backend.delete([info.key])
        assert [info.key for info in seen] == keys
        assert await listed(backend) == []

    async def test_delete_is_idempotent(self, backend: Backend) -> None:
        for key in ("a/1", "a/2", "b"):
            await backend.put(key, b"x")
        await backend.delete(["a/1", "missing", "no/such/folder", "a/1"])
        await backend.delete(iter(["a/1"]))
        await backend.delete([])
        assert await listed(backend) == ["a/2", "b"]

    async def test_a_deleted_key_can_be_put_again(self, backend: Backend) -> None:
        for _ in range(2):
            await backend.put("deep/er/x", b"x", if_absent=True)
            await backend.delete(["deep/er/x"])
        assert self.raw_names(backend) == set()

    async def test_head_tells_size_and_time(self, backend: Backend) -> None:
        put = await backend.put("x", bytes(123))
        head = await backend.head("x")
        assert head.size_bytes == 123
        assert abs(head.modified_seconds - put.modified_seconds) <= 5
        (scanned,) = [info async for info in backend.scan("")]
        assert abs(scanned.modified_seconds - head.modified_seconds) <= 1

    # Closing

    async def test_closing_twice_and_using_afterwards(self, backend: Backend) -> None:
        await backend.put("x", b"x")
        await backend.aclose()
        await backend.aclose()
        with pytest.raises(UsageError):
            await backend.get("x", limit_bytes=1)

    async def test_closing_waits_for_what_is_in_flight(self, backend: Backend) -> None:
        source = Filling(patterned(2 * self.part(backend)))
        put = asyncio.create_task(backend.put("x", source))
        await source.started.wait()
        await backend.aclose()
        assert self.raw_names(backend) == {"x"}
        assert (await put).size_bytes == source.view.nbytes

    # Against a dict

    def test_behaves_as_a_dict(self) -> None:
        """Any history of operations has the outcomes that a dict would give."""

        @settings(
            max_examples=self.examples_max,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
        )
        @given(st.lists(_OPERATIONS, max_size=12))
        def run(history: list[tuple[str, str, bytes, bool]]) -> None:
            with asyncio.Runner() as runner:
                runner.run(self._replay(history))

        run()

    async def _replay(self, history: list[tuple[str, str, bytes, bool]]) -> None:
        backend = self.make()
        model: dict[str, bytes] = {}
        try:
            for operation, key, data, if_absent in history:
                if operation == "put" and if_absent and key in model:
                    with pytest.raises(AlreadyExists):
                        await backend.put(key, data, if_absent=True)
                elif operation == "put":
                    await backend.put(key, data, if_absent=if_absent)
                    model[key] = data
                elif operation == "delete":
                    await backend.delete([key])
                    model.pop(key, None)
                elif operation == "scan":
                    prefix = key.rpartition("/")[0]
                    prefix = f"{prefix}/" if prefix else ""
                    assert await listed(backend, prefix) == sorted(k for k in model if k.startswith(prefix))
                elif key in model:
                    assert await backend.get(key, limit_bytes=100) == model[key]
                    assert (await backend.head(key)).size_bytes == len(model[key])
                else:
                    with pytest.raises(NotFound):
                        await backend.get(key, limit_bytes=100)
            assert self.raw_names(backend) == set(model)
        finally:
            await backend.aclose()


_OPERATIONS = st.tuples(
    st.sampled_from(["put", "put", "get", "delete", "scan"]),
    st.sampled_from(MODEL_KEYS),
    st.binary(max_size=100),
    st.booleans(),
)


def unique_name() -> str:
    """A name that no other test uses, and that is a segment of a key."""
    return uuid.uuid4().hex
