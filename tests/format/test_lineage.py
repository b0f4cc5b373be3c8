"""The line of a run, held against a plain history of what was trained on what."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.format.keys import Version
from ckptd.format.lineage import line

events = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("go back"), st.integers(0, 9)),
        st.tuples(st.just("start over"), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 9)),
    ),
    max_size=25,
)


@settings(max_examples=300)
@given(events)
def test_the_line_is_what_the_newest_state_was_trained_on(story: list[tuple[str, int]]) -> None:
    committed: list[Version] = []
    parents: dict[int, Version | None] = {1: None}
    ancestry: list[Version] = []  # of the live trainer's state, newest first
    line_then: list[Version] = []  # of the newest generation that has committed
    generation, step = 1, 0
    for what, amount in story:
        if what == "save":
            step += amount
            committed.append(Version(step, generation))
            ancestry = [committed[-1], *ancestry]
            line_then = ancestry
        elif what == "delete" and len(committed) > 1:
            gone = committed.pop(amount % (len(committed) - 1))  # never the newest
            ancestry, line_then = ([v for v in found if v != gone] for found in (ancestry, line_then))
        elif what in ("restart", "go back", "start over"):
            start = 0 if what == "restart" else amount if what == "go back" else len(line_then)
            ancestry = line_then[start:]
            generation += 1
            parents[generation] = ancestry[0] if ancestry else None
            step = ancestry[0].step if ancestry else 0
        assert line(committed, parents) == line_then


def test_r64_going_back_leaves_the_later_steps_off_the_line() -> None:
    committed = [Version(step, 1) for step in (10, 20, 30)]
    parents = {1: None, 2: Version(20, 1)}
    assert line(committed, parents) == [Version(30, 1), Version(20, 1), Version(10, 1)]
    committed.append(Version(30, 2))
    assert line(committed, parents) == [Version(30, 2), Version(20, 1), Version(10, 1)]


def test_r71_a_low_step_of_a_new_start_is_the_newest() -> None:
    committed = [Version(1000, 1), Version(10, 2)]
    assert line(committed, {1: None, 2: None}) == [Version(10, 2)]


def test_a_generation_without_a_commit_orphans_nothing() -> None:
    parents = {1: None, 2: Version(20, 1), 3: Version(20, 1), 9: None}
    assert line([Version(20, 1)], parents) == [Version(20, 1)]
    assert line([Version(20, 1), Version(30, 3)], parents) == [Version(30, 3), Version(20, 1)]


def test_a_parent_that_was_deleted_does_not_end_the_line() -> None:
    parents = {1: None, 2: Version(20, 1)}
    assert line([Version(10, 1), Version(30, 2)], parents) == [Version(30, 2), Version(10, 1)]


def test_records_that_lie_cannot_make_a_circle() -> None:
    for parents in ({2: Version(5, 2)}, {2: Version(5, 3)}, {2: Version(5, 1), 1: Version(5, 2)}):
        found = line([Version(5, 1), Version(5, 2)], parents)
        assert found[0] == Version(5, 2)
        assert len(found) == len(set(found))


def test_no_commit_no_line() -> None:
    assert line([], {1: None}) == []
