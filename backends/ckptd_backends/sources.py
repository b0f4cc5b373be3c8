"""What a put reads from: one shape for bytes, views and sources that still fill, and the parts they are read in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from ckptd.errors import UsageError
from ckptd.storage import ReleasableSource, Source

T = TypeVar("T")


class Part(NamedTuple):
    """The half-open range ``[start, stop)`` of an object."""

    start: int
    stop: int


class Whole:
    """Bytes that are all there already, as a :class:`Source`."""

    def __init__(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if not view.c_contiguous:
            raise UsageError("the data of a put must be contiguous")
        self.view = view.toreadonly().cast("B") if view.nbytes else memoryview(b"")

    async def ready(self, start: int, stop: int) -> None:
        """Everything is."""

    async def complete(self) -> None:
        """It always was."""


def source_of(data: bytes | memoryview | Source) -> Source:
    """``data`` as a source."""
    return Whole(data) if isinstance(data, bytes | bytearray | memoryview) else data


def stored(source: Source, part: Part) -> None:
    """Tell a source that can make use of it that a part has been stored."""
    if isinstance(source, ReleasableSource):
        source.stored(part.start, part.stop)


def byte_view(out: memoryview) -> memoryview:
    """``out`` as writable bytes. Raises :class:`UsageError` where it is neither contiguous nor writable."""
    if out.readonly or not out.c_contiguous:
        raise UsageError("the memory to read into must be writable and contiguous")
    return out.cast("B") if out.nbytes else memoryview(bytearray())


def parts_of(size: int, part_bytes: int, *, start: int = 0) -> list[Part]:
    """``[start, size)`` cut into parts of ``part_bytes``; the last may be shorter. Nothing for an empty range."""
    return [Part(at, min(at + part_bytes, size)) for at in range(start, size, part_bytes)]


async def each_part(parts: Sequence[Part], width: int, work: Callable[[int, Part], Awaitable[T]]) -> list[T]:
    """Do ``work(number, part)`` for every part, at most ``width`` at once, and return the results in order.

    The first failure cancels the others, waits for them, and is raised itself.
    """
    gate = asyncio.Semaphore(width)
    results: dict[int, T] = {}

    async def one(number: int, part: Part) -> None:
        try:
            results[number] = await work(number, part)
        finally:
            gate.release()

    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for number, part in enumerate(parts):
                await gate.acquire()
                group.create_task(one(number, part))
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
    if first is not None:
        try:
            raise first  # out here, where the group is not its context: an error must not hold on to itself
        finally:
            del first
    return [results[number] for number in range(len(parts))]
