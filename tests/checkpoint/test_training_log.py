"""Reading the training log of a run: what was gone back over is marked, what is damaged named, and the rest there."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.training_log import LoggedStep, reach, read_log
from ckptd.format.keys import LOG, Version
from tests.checkpoint.builder import flip, keys_of, open_generation, tamper
from tests.checkpoint.log_builder import put


def told(rows: list[LoggedStep]) -> list[tuple[int, int, bool]]:
    return [(row.generation, row.step, row.rolled_back) for row in rows]


async def test_no_log_is_an_empty_one(run: Run) -> None:
    found = await read_log(run)
    assert (list(found), found.columns, found.notes, dict(found.missing), len(found)) == ([], (), (), {}, 0)


async def test_steps_that_a_later_generation_went_back_over_are_marked(run: Run) -> None:
    await put(run, 1, range(1, 6))
    await put(run, 2, range(4, 9), opened_from=Version(3, 1))
    await put(run, 3, range(4, 6), opened_from=Version(3, 1))  # back to before what generation 2 has done
    assert told(list(await read_log(run))) == [
        *[(1, step, step > 3) for step in range(1, 6)],
        *[(2, step, True) for step in range(4, 9)],
        *[(3, step, False) for step in range(4, 6)],
    ]
    await put(run, 4, range(6, 7), opened_from=Version(5, 2))  # the training went on from generation 2 after all
    assert [row for row in told(list(await read_log(run))) if not row[2]] == [
        *[(1, step, False) for step in (1, 2, 3)],
        *[(2, step, False) for step in (4, 5)],
        (4, 6, False),
    ]
    await put(run, 5, range(1, 3))  # anew from nothing
    assert [row for row in told(list(await read_log(run))) if not row[2]] == [(5, 1, False), (5, 2, False)]


@given(
    parents=st.lists(st.none() | st.tuples(st.integers(1, 8), st.integers(0, 50)), max_size=8).map(
        lambda found: {
            number: None if parent is None else Version(parent[1], parent[0]) for number, parent in enumerate(found, 1)
        }
    )
)
def test_the_reach_leads_from_the_newest_to_older_ones(parents: dict[int, Version | None]) -> None:
    found = reach(parents)
    assert list(found) == sorted(found, reverse=True)
    assert next(iter(found.items()), (None, None)) == ((max(parents), None) if parents else (None, None))
    for younger, older in zip(found, list(found)[1:], strict=False):
        assert parents[younger] == Version(found[older] or 0, older)


async def test_a_segment_and_its_successor_are_one(run: Run) -> None:
    await put(run, 1, range(1, 4))
    await put(run, 1, range(1, 8))
    await put(run, 1, range(6, 12), first=6)  # of a daemon that began anew meanwhile
    found = await read_log(run)
    assert [row.step for row in found] == list(range(1, 12))
    assert (len(found), dict(found.missing)) == (11, {})


async def test_what_is_damaged_is_named_and_the_rest_is_shown(run: Run) -> None:
    await open_generation(run)
    kept = await put(run, 1, range(1, 4))
    lost = await put(run, 1, range(4, 9), first=4)
    await put(run, 1, range(9, 11), first=9)
    await tamper(run.backend, lost, flip(-20))
    found = await read_log(run)
    assert [row.step for row in found] == [1, 2, 3, 9, 10]
    assert (len(found.notes), dict(found.missing)) == (1, {1: 5})
    assert lost in found.notes[0]
    await run.backend.delete([kept, lost])
    found = await read_log(run)
    assert ([row.step for row in found], found.notes, dict(found.missing)) == ([9, 10], (), {1: 8})


async def test_where_a_generation_came_from_is_known_elsewhere_too(run: Run) -> None:
    """Where all that its log said of that is damaged."""
    await open_generation(run)
    await put(run, 1, range(1, 6))
    await open_generation(run, opened_from=Version(3, 1))
    key = await put(run, 2, range(4, 6), opened_from=Version(3, 1))
    await tamper(run.backend, key, flip(-20))
    assert told(list(await read_log(run))) == [(1, step, step > 3) for step in range(1, 6)]


@pytest.mark.parametrize("swapped", ["place", "run"])
async def test_a_segment_at_anothers_place_is_refused(run: Run, swapped: str) -> None:
    key = await put(run, 1, range(1, 3)) if swapped == "place" else await put(Run(run.backend, "other"), 1, range(1, 3))
    if swapped == "place":
        data = await run.backend.get(key, limit_bytes=10**6)
        await run.backend.delete([key])
        key = key.replace("log/000001", "log/000002")
        await run.backend.put(key, data)
    found = await read_log(run)
    assert list(found) == []
    assert key in found.notes[0]


async def test_only_the_newest_are_read_where_no_more_is_asked_for(run: Run) -> None:
    old = await put(run, 1, range(1, 101))
    await put(run, 1, range(101, 201), first=101)
    await put(run, 2, range(151, 161), opened_from=Version(150, 1))
    await tamper(run.backend, old, flip(-20))
    found = await read_log(run, last=30)
    assert (len(found), found.notes) == (110, ())
    assert told(list(found))[-11:] == [(1, 200, True), *[(2, step, False) for step in range(151, 161)]]
    assert len((await read_log(run, last=111)).notes) == 1


async def test_ranks_are_apart_and_foreign_names_passed_over(run: Run) -> None:
    await put(run, 1, range(1, 3), loss=math.nan)
    await put(run, 1, range(1, 4), rank=3)
    await run.backend.put(f"{LOG}000001/notes.txt", b"mine")
    assert len(await keys_of(run.backend, LOG)) == 3
    assert [row.step for row in await read_log(run, rank=3)] == [1, 2, 3]
    found = await read_log(run)
    assert all(math.isnan(row.values["loss"]) for row in found)
    assert (found.columns, found.notes) == (("loss", "tokens"), ())
