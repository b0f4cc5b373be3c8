"""Rows on their way to one root: whatever fails, and whoever begins anew, what was stored stays."""

from __future__ import annotations

import random
import uuid

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.training_log import log_keys, read_log
from ckptd.daemon.log_writing import LogWriter, Waiting
from ckptd.errors import Unavailable
from ckptd.limits import LOG_SEGMENT_ROWS_MAX
from ckptd.pulse.rows import Row
from ckptd.storage import Backend, open_backend
from ckptd_backends.wrappers.base import Wrapper
from tests.checkpoint.builder import open_generation

LIFE = "0123456789abcdef" * 2


def row(number: int) -> Row:
    return Row(number, 10 * number, 1.8e9 + number, 0.5, {"loss": 1.0 / number})


class Failing(Wrapper):
    """Does not answer now and then."""

    def __init__(self, backend: Backend, chance: random.Random) -> None:
        super().__init__(backend)
        self.chance = chance
        self.fails = 0.3

    def _ask(self) -> None:
        if self.chance.random() < self.fails:
            raise Unavailable("not now", key="log")

    async def put(self, key, data, *, if_absent=False):  # type: ignore[no-untyped-def]
        self._ask()
        found = await super().put(key, data, if_absent=if_absent)
        self._ask()  # the answer is lost
        return found

    async def delete(self, keys) -> None:  # type: ignore[no-untyped-def]
        self._ask()
        await super().delete(keys)


async def begun() -> Run:
    run = await Run.open(open_backend(f"memory://{uuid.uuid4().hex}"), create=True)
    await open_generation(run)
    return run


@pytest.mark.parametrize("seed", range(12))
async def test_what_was_stored_stays_whatever_fails(seed: int) -> None:
    chance = random.Random(seed)
    run = await begun()
    store = Failing(run.backend, chance)
    ring: list[Row] = []
    """The trainer's memory: the newest 300."""
    reported, number = dict[int, Row](), 0
    waiting = Waiting(chance.choice([400, 5000]))
    writer = LogWriter(store, 0, LIFE, waiting)
    stored: set[int] = set()
    for _ in range(80):
        for _ in range(chance.choice([0, 1, 5, 60, 400])):
            number += 1
            ring.append(row(number))
            reported[number] = ring[-1]
        del ring[:-300]
        if chance.random() < 0.1:  # another daemon
            waiting = Waiting(400)
            writer = LogWriter(store, 0, LIFE, waiting)
        waiting.add([one for one in ring if one.number > waiting.newest])
        waiting.forget(writer.needed)
        if chance.random() < 0.6:
            await writer.write(1)
        found = {one.step // 10 for one in await read_log(run)}
        assert stored <= found, "something of it has gone"
        stored = found
    store.fails = 0.0
    await writer.write(1)
    log = await read_log(run)
    assert [one.step for one in log] == sorted({one.step for one in log})
    assert all(one.values == reported[one.step // 10].values for one in log)
    assert {one.number for one in ring} <= {one.step // 10 for one in log}
    assert len(log) + sum(log.missing.values()) == number
    assert not writer.behind
    assert writer.error == ""


async def test_one_segment_grows_until_it_is_full() -> None:
    run = await begun()
    waiting = Waiting(5000)
    writer = LogWriter(run.backend, 0, LIFE, waiting)
    for stop in (10, 700, LOG_SEGMENT_ROWS_MAX + 5, 2 * LOG_SEGMENT_ROWS_MAX, 2 * LOG_SEGMENT_ROWS_MAX + 1):
        waiting.add([row(number) for number in range(waiting.newest + 1, stop + 1)])
        await writer.write(1)
        waiting.forget(writer.needed)
        assert len(await read_log(run)) == stop
        assert len(await log_keys(run)) == -(-stop // LOG_SEGMENT_ROWS_MAX)
        assert len(waiting) <= LOG_SEGMENT_ROWS_MAX
    assert writer.lost == 0


async def test_what_can_no_longer_be_made_longer_is_not_taken_away() -> None:
    run = await begun()
    waiting = Waiting(50)
    writer = LogWriter(run.backend, 0, LIFE, waiting)
    waiting.add([row(number) for number in range(1, 41)])
    await writer.write(1)
    waiting.add([row(number) for number in range(41, 81)])  # the first ones are forgotten
    await writer.write(1)
    assert [one.step // 10 for one in await read_log(run)] == list(range(1, 81))
    waiting.add([row(number) for number in range(81, 201)])
    await writer.write(1)
    log = await read_log(run)
    assert (dict(log.missing), writer.lost) == ({1: 70}, 70)
