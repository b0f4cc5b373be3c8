"""Every wrapper passes the suite of what it wraps, and does what it is for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Literal

import pytest

from ckptd.errors import AccessDenied, AlreadyExists, NotFound, Unavailable
from ckptd.pace import Pace
from ckptd.storage import Backend, ObjectInfo, open_backend
from ckptd_backends import memory
from ckptd_backends.testing import BackendTests, listed, patterned, unique_name
from ckptd_backends.wrappers import Faulty, Limited, Retrying, RetryPolicy, Slow, Traced

QUICK = RetryPolicy(attempts_max=3, deadline_seconds=10, delay_seconds=0.001, delay_seconds_max=0.002)


def plain() -> Backend:
    return open_backend(f"memory://{unique_name()}")


class WrapperTests(BackendTests):
    copies_data = True
    examples_max = 15

    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        memory.stores[backend.url][key] = (data, time.time())

    def raw_names(self, backend: Backend) -> set[str]:
        return set(memory.stores[backend.url])


class TestRetrying(WrapperTests):
    def make(self) -> Backend:
        return Retrying(plain(), QUICK)


class TestLimited(WrapperTests):
    def make(self) -> Backend:
        return Limited(plain(), operations_max=2, up=Pace(1 << 30), down=Pace(1 << 30))


class TestTraced(WrapperTests):
    def make(self) -> Backend:
        return Traced(plain())


class TestFaulty(WrapperTests):
    def make(self) -> Backend:
        return Faulty(plain(), fail_at=10**9)


class TestSlow(WrapperTests):
    def make(self) -> Backend:
        return Slow(plain(), delay_seconds=0.0001)


class TestAllTogether(WrapperTests):
    """In the order of production, over a store that fails once, early."""

    def make(self) -> Backend:
        return Traced(Retrying(Limited(Faulty(plain(), fail_at=2, when="after"), operations_max=3), QUICK))


# Retrying


async def work(backend: Backend) -> None:
    """A save in small: data, then the commit, then tidying up."""
    await backend.put("data/1", b"shard")
    await backend.put("commit", b"manifest", if_absent=True)
    await backend.delete(["data/0", "data/2"])


@pytest.mark.parametrize("when", ["before", "after"])
async def test_each_single_fault_is_survived(when: Literal["before", "after"]) -> None:
    for fail_at in range(1, 10):
        faulty = Faulty(plain(), fail_at=fail_at, when=when)
        await work(Retrying(faulty, QUICK))
        assert await listed(faulty) == ["commit", "data/1"]
        if faulty.calls < fail_at:
            assert fail_at == 4
            return
    pytest.fail("the faults never ended")


async def test_a_conflict_with_another_writer_stays_one() -> None:
    inner = plain()
    await inner.put("commit", b"theirs")
    with pytest.raises(AlreadyExists):
        await Retrying(Faulty(inner, fail_at=1, when="before"), QUICK).put("commit", b"mine", if_absent=True)
    assert await inner.get("commit", limit_bytes=10) == b"theirs"


async def test_even_equal_bytes_conflict_at_the_first_attempt() -> None:
    """Only a put that may have taken effect before can be its own rival."""
    retrying = Retrying(plain(), QUICK)
    await retrying.put("commit", b"same", if_absent=True)
    with pytest.raises(AlreadyExists):
        await retrying.put("commit", b"same", if_absent=True)


async def test_what_is_final_is_not_tried_again() -> None:
    faulty = Faulty(plain(), fail_at=1, error=AccessDenied("no"))
    with pytest.raises(AccessDenied):
        await Retrying(faulty, QUICK).put("x", b"x")
    assert faulty.calls == 1


class Down(Traced):
    """Answers nothing."""

    async def put(self, key: str, data: object, *, if_absent: bool = False) -> ObjectInfo:
        with self._traced("put", key):
            raise Unavailable("down")

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Breaks off after each object."""
        self.counts["scan"].calls += 1
        async for info in self.inner.scan(prefix):
            yield info
            if self.counts["scan"].calls < 3:
                raise Unavailable("broke off")


async def test_attempts_are_bounded() -> None:
    down = Down(plain())
    with pytest.raises(Unavailable):
        await Retrying(down, QUICK).put("x", b"x", if_absent=True)
    assert down.counts["put"].calls == QUICK.attempts_max


async def test_no_attempt_begins_after_the_deadline() -> None:
    down = Down(plain())
    policy = RetryPolicy(attempts_max=10**6, deadline_seconds=0.2, delay_seconds=0.01, delay_seconds_max=0.01)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(Retrying(down, policy).put("x", b"x"), 10)
    assert 1 < down.counts["put"].calls < 10**4


async def test_a_scan_that_breaks_off_goes_on() -> None:
    inner = plain()
    for key in "abcd":
        await inner.put(key, b"x")
    assert await listed(Retrying(Down(inner), QUICK)) == ["a", "b", "c", "d"]


# Limited


async def test_bytes_are_paid_for_in_time() -> None:
    """Lower bounds only: the limit is a promise, how much slower it gets is not."""
    limited = Limited(plain(), up=Pace(10 << 20), down=Pace(20 << 20))
    data = patterned(2 << 20)
    began = time.monotonic()
    await asyncio.gather(limited.put("x", data[: 1 << 20]), limited.put("y", data[1 << 20 :]))
    assert time.monotonic() - began >= 0.2
    out = bytearray(1 << 20)
    began = time.monotonic()
    await asyncio.gather(limited.read_into("x", memoryview(out)), limited.get("y", limit_bytes=1 << 20))
    assert time.monotonic() - began >= 0.1
    assert out == data[: 1 << 20]


async def test_operations_at_once_are_bounded() -> None:
    running = most = 0

    class Watching(Slow):
        async def head(self, key: str) -> ObjectInfo:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().head(key)
            finally:
                running -= 1

    inner = plain()
    await inner.put("x", b"x")
    limited = Limited(Watching(inner, delay_seconds=0.005), operations_max=3)
    await asyncio.gather(*(limited.head("x") for _ in range(12)))
    assert most == 3


# Traced


async def test_operations_are_counted() -> None:
    traced = Traced(plain())
    await traced.put("x", bytes(100))
    await traced.get("x", limit_bytes=100)
    await traced.read_into("x", memoryview(bytearray(7)))
    with pytest.raises(NotFound):
        await traced.head("y")
    assert await listed(traced) == ["x"]
    counted = {name: (count.calls, count.failures, count.size_bytes) for name, count in traced.counts.items()}
    assert counted == {
        "put": (1, 0, 100),
        "get": (1, 0, 100),
        "read_into": (1, 0, 7),
        "head": (1, 1, 0),
        "scan": (1, 0, 0),
    }
