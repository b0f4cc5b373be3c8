"""The plan of retention: which rule keeps what, and what no rule can take away."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.keep import Facts, Keep, plan
from ckptd.checkpoint.standing import Standing, mark_order, standing
from ckptd.errors import ConfigError, UsageError
from ckptd.format.keys import Version
from ckptd.storage import ObjectInfo


def at(*steps: int, generation: int = 1) -> list[Version]:
    return [Version(step, generation) for step in steps]


def line_of(*steps: int) -> list[Version]:
    """Newest first."""
    return at(*sorted(steps, reverse=True))


def kept(keep: Keep, **facts: Any) -> list[int]:
    """The steps that stay, ascending."""
    return sorted(version.step for version in plan(keep, Facts(**facts)).keep)


versions = st.lists(st.builds(Version, st.integers(0, 50), st.integers(1, 3)), unique=True, min_size=1, max_size=12)
standings = st.builds(Standing, st.booleans(), st.booleans(), st.booleans(), st.booleans())
keeps = st.builds(
    Keep,
    last=st.integers(1, 8),
    every_steps=st.none() | st.integers(1, 60),
    every=st.none() | st.floats(0.1, 100),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    verified=st.integers(1, 2),
    beside_seconds=st.floats(0, 100),
)


@st.composite
def situations(draw: st.DrawFn) -> Facts:
    found = sorted(draw(versions), key=lambda v: (v.generation, v.step), reverse=True)
    cut = draw(st.integers(1, len(found)))
    times = {version: draw(st.floats(0, 200)) for version in found}
    losses = st.none() | st.floats(allow_nan=True, allow_infinity=True)
    refers = draw(st.dictionaries(st.sampled_from(found), st.lists(st.sampled_from(found), max_size=2), max_size=4))
    return Facts(
        line=found[:cut],
        beside={version: draw(st.floats(0, 200)) for version in found[cut:]},
        standings=draw(st.dictionaries(st.sampled_from(found), standings)),
        committed_seconds=times,
        metrics={version: {"loss": draw(losses)} for version in found if draw(st.booleans())},
        references=refers,
        held=draw(st.dictionaries(st.sampled_from(found[:cut]), st.just("to be copied"), max_size=2)),
    )


@given(keeps, situations())
def test_what_no_rule_can_take_away(keep: Keep, facts: Facts) -> None:
    verdict = plan(keep, facts)
    everything = [*facts.line, *facts.beside]
    assert [*verdict.keep, *verdict.delete] != []
    assert verdict.keep.keys() | verdict.delete.keys() == set(everything)
    assert not verdict.keep.keys() & verdict.delete.keys()
    assert all({**verdict.keep, **verdict.delete}.values())
    good = [version for version in facts.line if facts.standing(version).good]
    verified = [version for version in good if facts.standing(version).verified]
    must = {
        *facts.line[: keep.last],
        *good[: keep.last],
        *verified[: keep.verified],
        *facts.held,
        *[version for version in everything if facts.standing(version).pinned],
        *[old for version in verdict.keep for old in facts.references.get(version, ()) if old in everything],
    }
    assert verdict.keep.keys() >= must
    for quality in ("good", "verified"):
        there = [v for v in everything if facts.standing(v).good and getattr(facts.standing(v), quality)]
        assert not there or set(there) & verdict.keep.keys()


@given(keeps, situations())
def test_a_plan_that_was_carried_out_is_the_plan(keep: Keep, facts: Facts) -> None:
    """What a pass leaves, the next one leaves too, as long as nothing new comes and no time passes."""
    left = plan(keep, facts).keep
    again = plan(
        keep,
        with_changes(
            facts,
            line=[version for version in facts.line if version in left],
            beside={version: seconds for version, seconds in facts.beside.items() if version in left},
        ),
    )
    assert again.delete == {}


def with_changes(facts: Facts, **changes: Any) -> Facts:
    fields = {name: getattr(facts, name) for name in Facts.__slots__}
    return Facts(**{**fields, **changes})


def test_the_newest_and_as_many_good_ones() -> None:
    bad = dict.fromkeys(at(40, 50, 60, 70), Standing(unhealthy=True))
    assert kept(Keep(last=2), line=line_of(*range(10, 80, 10)), standings=bad) == [20, 30, 60, 70]


def test_r72_unhealthy_ones_push_no_healthy_one_out() -> None:
    bad = dict.fromkeys(at(*range(40, 110, 10)), Standing(verified=True, unhealthy=True))
    assert kept(Keep(last=3), line=line_of(*range(10, 110, 10)), standings=bad) == [10, 20, 30, 80, 90, 100]
    spared = kept(Keep(last=1, every_steps=30), line=line_of(*range(10, 110, 10)), standings=bad)
    assert spared == [10, 30, 100]


def test_intervals_are_kept_for_good_and_do_not_move() -> None:
    assert kept(Keep(last=1, every_steps=100), line=line_of(0, 40, 100, 130, 210, 290, 300)) == [0, 100, 210, 300]
    assert kept(Keep(last=1, every_steps=100), line=line_of(0, 100, 210, 300, 301)) == [0, 100, 210, 300, 301]
    times = {version: version.step * 1.0 for version in line_of(0, 40, 70, 101, 150, 190)}
    assert kept(Keep(last=1, every=60.0), line=line_of(0, 40, 70, 101, 150, 190), committed_seconds=times) == [
        *(0, 70, 150),
        190,
    ]


@pytest.mark.parametrize(("direction", "best"), [("min", [20, 40]), ("max", [30, 50])])
def test_the_best_are_numbers(direction: Any, best: list[int]) -> None:
    losses = {10: math.nan, 20: 0.1, 30: 0.5, 40: 0.2, 50: 0.9, 60: None, 70: -math.inf, 80: math.inf}
    metrics = {Version(step, 1): {"loss": loss} for step, loss in losses.items()}
    found = kept(Keep(last=1, best=("loss", direction, 2)), line=line_of(*losses, 90), metrics=metrics)
    assert found == [*best, 90]


def test_of_equally_good_ones_the_newer_and_none_that_is_bad() -> None:
    metrics = {version: {"loss": 0.5} for version in line_of(10, 20, 30)}
    marks = {Version(30, 1): Standing(unhealthy=True)}
    assert kept(
        Keep(last=1, best=("loss", "min", 1)), line=line_of(10, 20, 30, 40), metrics=metrics, standings=marks
    ) == [20, 40]


def test_pins_by_mark_and_by_name() -> None:
    marks = {Version(30, 1): Standing(pinned=True), Version(20, 2): Standing(suspect=True)}
    line = [*at(50, 40, 20, generation=2), *at(20, 10)]
    assert plan(Keep(last=1, pins=(40, "20-g1")), Facts(line=line, beside={Version(30, 1): 1e9}, standings=marks)) == (
        plan(Keep(last=1, pins=("40-g2", "20-g1")), Facts(line=line, beside={Version(30, 1): 1e9}, standings=marks))
    )
    found = plan(Keep(last=1, pins=(40, "20-g1")), Facts(line=line, beside={Version(30, 1): 1e9}, standings=marks))
    assert list(found.keep) == [*at(50, 40, generation=2), Version(20, 1), Version(30, 1)]


def test_what_is_referred_to_stays_however_far_back() -> None:
    refers = {Version(40, 1): at(30, 10), Version(30, 1): at(20)}
    found = plan(Keep(last=1), Facts(line=line_of(5, 10, 20, 30, 40), references=refers))
    assert list(found.keep) == line_of(10, 20, 30, 40)
    assert found.keep[Version(20, 1)] == "30-g1 needs bytes of it"


def test_every_verdict_has_a_reason() -> None:
    facts = Facts(
        line=line_of(10, 20, 30, 40), beside={Version(5, 1): 7.0}, standings={Version(20, 1): Standing(verified=True)}
    )
    found = plan(Keep(last=1, beside_seconds=1), facts)
    assert found.keep == {Version(40, 1): "one of the last 1", Version(20, 1): "the newest that was verified"}
    assert found.delete == {
        Version(30, 1): "1 newer ones are committed, and no rule keeps it",
        Version(10, 1): "3 newer ones are committed, and no rule keeps it",
        Version(5, 1): "off the line for 7 s",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": 0},
        {"verified": 0},
        {"every_steps": 0},
        {"every": -1.0},
        {"every": math.nan},
        {"best": ("loss", "least", 1)},
        {"best": ("loss", "min", 0)},
        {"best": ("loss",)},
        {"best": "loss"},
        {"pins": ("latest",)},
        {"beside_seconds": -1.0},
    ],
    ids=str,
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        Keep(**wrong)


def test_what_is_no_pin_is_refused() -> None:
    with pytest.raises(UsageError, match="not a checkpoint"):
        Keep(pins=("best",))


def test_rules_go_over_the_wire() -> None:
    keep = Keep(last=2, every=1.5, best=("loss", "max", 3), pins=(5, "6-g1"))
    sent = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(keep)))
    assert msgspec.convert(sent, Keep) == keep


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], Standing()),
        (["verified"], Standing(verified=True)),
        (["verified", "suspect"], Standing(suspect=True)),
        (["suspect", "verified"], Standing(verified=True)),
        (["unhealthy", "verified"], Standing(verified=True, unhealthy=True)),  # what is broken may well verify
        (["unhealthy", "suspect", "revoked"], Standing()),
        (["pinned", "verified", "unpinned"], Standing(verified=True)),
        (["unpinned", "pinned"], Standing(pinned=True)),
    ],
    ids=str,
)
def test_what_marks_add_up_to(kinds: list[str], expected: Standing) -> None:
    assert standing(kinds) == expected


def test_at_the_same_time_the_suspicion_is_the_later() -> None:
    names = ["verified-b", "suspect-a", "unhealthy-c"]
    found = [ObjectInfo(f"marks/000000000001-g000001/{name}.json", 1, 5.0) for name in names]
    assert [info.key.rpartition("/")[2] for info in sorted(found, key=mark_order)][-1] == "suspect-a.json"
