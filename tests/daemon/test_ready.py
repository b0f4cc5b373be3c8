"""Arenas that a daemon makes before anybody asks, of the shapes that the last one had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.arena import Arena, ArenaShape
from ckptd.cli.daemon_call import call
from ckptd.daemon import ready
from ckptd.daemon.ready import WASTE_MAX, ReadyArenas
from ckptd.limits import MIB, PAGE_BYTES
from ckptd.wire.messages import GetStatus, Status
from ckptd_client import Checkpointer
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training, own_daemon

__all__ = ["own_daemon"]

SLOT_BYTES = 64 * PAGE_BYTES
SHAPE = ArenaShape(2, SLOT_BYTES)
Begun = tuple[ReadyArenas, asyncio.Task[None]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "DELAY_SECONDS", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "arenas.json"


async def begun(file: Path, *shapes: ArenaShape, room_bytes: int = 1024 * MIB) -> Begun:
    """The next daemon's, when the last one had arenas of these shapes."""
    await ReadyArenas(file).keep(shapes)
    found = ReadyArenas(file)
    return found, asyncio.create_task(found.make(lambda: room_bytes))


async def made(file: Path, *shapes: ArenaShape) -> Begun:
    """As :func:`begun`, and all of them are there."""
    found, making = await begun(file, *shapes)
    there = [True] * len(shapes)
    await asyncio.to_thread(
        lambda: wait_until(
            lambda: making.done() or [entry.arena is not None for entry in found._entries] == there,
            "the arenas",
            deadline_seconds=30,
        )
    )
    return found, making


async def end(found: ReadyArenas, making: asyncio.Task[None]) -> None:
    making.cancel()
    await asyncio.wait([making])
    found.give_back()
    assert found.size_bytes == 0


async def test_an_arena_goes_to_whoever_wants_its_shape_once(file: Path) -> None:
    found, making = await made(file, SHAPE)
    for slots, slot_bytes in ((1, SLOT_BYTES), (2, SLOT_BYTES + PAGE_BYTES), (2, int(SLOT_BYTES / WASTE_MAX) - 1)):
        assert await found.take(slots, slot_bytes, wait=True) is None
    arena = await found.take(2, SLOT_BYTES - PAGE_BYTES, wait=True)
    assert isinstance(arena, Arena)
    assert arena.shape == SHAPE
    assert await found.take(2, SLOT_BYTES, wait=True) is None
    arena.close()
    await end(found, making)


async def test_the_one_that_is_being_made_is_waited_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocating, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    allocate = Arena.allocate

    def slowly(arena: Arena) -> None:
        loop.call_soon_threadsafe(allocating.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        allocate(arena)

    monkeypatch.setattr(Arena, "allocate", slowly)
    found, making = await begun(file, SHAPE, SHAPE)
    await allocating.wait()
    assert await found.take(2, SLOT_BYTES, wait=False) is None
    given_up = asyncio.create_task(found.take(2, SLOT_BYTES, wait=True))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    waiting = asyncio.create_task(found.take(2, SLOT_BYTES, wait=True))
    await asyncio.sleep(0)
    assert await found.take(2, SLOT_BYTES, wait=True) is None, "the second, not begun, is left to who wants it"
    go_on.set()
    arena = await waiting
    assert isinstance(arena, Arena)
    arena.close()
    await end(found, making)


async def test_none_is_made_without_room_for_another(file: Path) -> None:
    found, making = await begun(file, SHAPE, room_bytes=2 * SHAPE.size_bytes - 1)
    await asyncio.sleep(0.1)
    assert await found.take(2, SLOT_BYTES, wait=True) is None
    await end(found, making)


async def test_of_trainers_that_live_none_is_made_twice(file: Path) -> None:
    found, making = await made(file, SHAPE, SHAPE)
    found.not_needed(SHAPE)
    assert found.size_bytes == SHAPE.size_bytes
    await end(found, making)


async def test_what_nobody_wants_is_given_back(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "READY_SECONDS", 0.0)
    found, making = await made(file, SHAPE)
    await making
    assert found.size_bytes == 0


@pytest.mark.parametrize("text", ["", "[{}]", '[{"slots":1,"slot_bytes":5}]', '[{"slots":9e99,"slot_bytes":4096}]'])
def test_a_file_that_makes_no_sense_is_passed_over(file: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "READY_SECONDS", 0.0)
    file.write_text(text)
    asyncio.run(ReadyArenas(file).make(lambda: 1024 * MIB))


def test_after_a_crash_a_trainer_finds_its_arena_and_restores_into_it(
    own_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """And the daemon that follows on one with a living trainer gets that one's, and keeps none beside it."""
    daemon = own_daemon()
    url, training = f"file://{tmp_path / 'run'}", Training(width=256)

    def arena_bytes() -> int:
        return int(call(daemon.socket, GetStatus(), Status, seconds=10).status["arena_bytes"])

    with Checkpointer(url, training.state, socket=daemon.socket) as ckpt:
        training.step()
        ckpt.save(1).wait(timeout=60)
        size_bytes = arena_bytes()
        kept = daemon.socket.parent / "state" / "arenas.json"
        wait_until(lambda: kept.exists() and len(kept.read_bytes()) > 2, "the shape", deadline_seconds=30)
        weights = [parameter.clone() for parameter in training.parameters()]
    daemon.kill()
    daemon.start()
    wait_until(lambda: arena_bytes() == size_bytes, "an arena made ahead", deadline_seconds=60)

    restored = Training(width=256, seed=1)
    with Checkpointer(url, restored.state, socket=daemon.socket) as ckpt:
        ring = ckpt._supply.current()
        assert ring is not None
        assert ckpt.restore().source == "storage"
        assert all((now == then).all() for now, then in zip(restored.parameters(), weights, strict=True))
        assert ckpt._supply.current() is ring
        restored.step()
        ckpt.save(2).wait(timeout=60)
        assert arena_bytes() == size_bytes
        daemon.kill()
        daemon.start()
        restored.step()
        ckpt.save(3).wait(timeout=60)
        wait_until(lambda: arena_bytes() == size_bytes, "the trainer's arena alone", deadline_seconds=60)
