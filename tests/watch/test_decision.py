"""The decision, by simulated clocks: no false alarm over long trainings, no hang that is missed, nothing too early."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.daemon.watch.decision import PAUSE_SECONDS_MIN, SETTLE_TICKS, Action, Sample, Watch
from ckptd.daemon.watch.rules import LEARNED_MIN, WARM_STEPS, WatchRules
from ckptd.pulse import Phase
from tests.watch.simulated import RULES, START, Rank, Stay, hang, simulate, steady

INF = float("inf")
LEARNED = WARM_STEPS + LEARNED_MIN + 2


def kinds(found: list[tuple[float, Action]]) -> list[str]:
    return [action.what for _, action in found]


def ranks_of(action: Action) -> list[int]:
    return [sample.rank for sample in action.samples]


def test_r152_two_thousand_steps_with_slow_evaluations_and_compiles_then_a_real_hang() -> None:
    chance = random.Random(7)
    plan = [Stay(Phase.RESTORE, 900), Stay(Phase.STEP, 600), *steady(WARM_STEPS, 60)]
    for step in range(2000):
        plan.append(Stay(Phase.STEP, chance.uniform(0.8, 3.0)))
        if step % 100 == 50:
            plan.append(Stay(Phase.EVAL, chance.uniform(300, 1500)))
        if step % 400 == 399:
            plan.append(Stay(Phase.COMPILE, chance.uniform(300, 1000)))
        if step % 20 == 0:
            plan.append(Stay(Phase.SAVE, chance.uniform(0.1, 5.0)))
        if step % 500 == 0:
            plan.append(Stay(Phase.SAVE, 5_000, busy=True))  # the store is that slow
    lasts = sum(stay.seconds for stay in plan)
    ranks = [Rank(rank, [*plan, hang()]) for rank in range(2)]
    rules = replace(RULES, floor_seconds=5.0)
    found = simulate(ranks, lasts + 600, rules)
    assert kinds(found) == ["report", "end"]
    (reported, report), (ended, _) = found
    assert lasts < reported < lasts + 60  # with a limit that was learned, not that of the first steps
    assert ranks_of(report) == [0, 1]
    assert not report.alone
    assert ended - reported >= rules.grace_seconds


def test_one_rank_that_hangs_is_told_from_all() -> None:
    alone = simulate([Rank(0, steady(2000)), Rank(1, [*steady(LEARNED), hang()])], LEARNED + 300)
    assert kinds(alone) == ["report", "end"]
    assert [ranks_of(action) for _, action in alone] == [[1], [1]]
    assert alone[0][1].alone
    together = simulate([Rank(rank, [*steady(LEARNED), hang()]) for rank in range(4)], LEARNED + 300)
    assert kinds(together) == ["report", "end"]
    assert ranks_of(together[0][1]) == [0, 1, 2, 3]
    assert not together[0][1].alone


def test_ranks_that_stall_one_after_the_other_within_a_tick_are_one_report() -> None:
    plans = [[*steady(LEARNED), hang()], [*steady(LEARNED), Stay(Phase.STEP, 1.0), hang()]]
    found = simulate([Rank(rank, plan) for rank, plan in enumerate(plans)], LEARNED + 130)
    assert [(action.what, ranks_of(action)) for _, action in found] == [("report", [0, 1])]


def test_those_who_wait_for_a_slow_rank_are_not_stalled_and_that_rank_is_when_its_time_is_up() -> None:
    evaluating = [*steady(LEARNED), Stay(Phase.EVAL, 3000), *steady(500)]
    waiting = [*steady(LEARNED), Stay(Phase.STEP, 3001), *steady(499)]
    assert simulate([Rank(0, evaluating), Rank(1, waiting)], 3400) == []
    stuck = [*steady(LEARNED), hang(Phase.EVAL)]
    found = simulate([Rank(0, stuck), Rank(1, [*steady(LEARNED), hang()])], 4000)
    assert kinds(found) == ["report", "end"]
    assert found[0][0] > 3600
    assert ranks_of(found[0][1]) == [0, 1]
    # One that is behind the slow rank cannot be waiting for it.
    behind = simulate([Rank(0, evaluating), Rank(1, [*steady(LEARNED - 1), hang()])], 400)
    assert [ranks_of(action) for _, action in behind if action.what == "report"] == [[1]]


def test_a_limit_of_the_trainers_own_goes_before_all_others() -> None:
    patient = [*steady(LEARNED), Stay(Phase.EVAL, 9000, given=10_000), *steady(10)]
    assert simulate([Rank(0, patient)], 9100) == []
    strict = [*steady(LEARNED), hang(Phase.EVAL, given=30.0)]
    found = simulate([Rank(0, strict)], LEARNED + 120)
    assert kinds(found) == ["report", "end"]
    assert found[0][0] - LEARNED < 40


def test_a_daemon_that_stood_still_suspects_nobody() -> None:
    assert simulate([Rank(0, steady(3000))], 2900, skip=[(1000, 2000)]) == []
    rules = replace(RULES, floor_seconds=5.0, first_seconds=5.0)
    quiet = Sample(start=START, rank=0, life="a", beats=9, step=9, phase=Phase.STEP, age_seconds=0.0, limit_seconds=5.0)
    watch = Watch(rules)
    watch.decide(0.0, [quiet])
    late = PAUSE_SECONDS_MIN + rules.tick_seconds + 1000
    assert watch.decide(late, [replace(quiet, age_seconds=late)]) == []  # nobody has looked: it may have moved
    later = [late + seconds for seconds in range(1, 12)]
    found = [action.what for now in later for action in watch.decide(now, [replace(quiet, age_seconds=now)])]
    assert found == ["report"]  # but it did not move since


def test_r151_what_one_life_left_behind_does_not_bear_on_the_next() -> None:
    rules = replace(RULES, floor_seconds=5.0)
    watch = Watch(rules)
    dying = Sample(
        start=START, rank=0, life="first", beats=7, step=7, phase=Phase.SAVE, age_seconds=50, limit_seconds=10
    )
    assert [action.what for now in range(4) for action in watch.decide(now, [dying])] == ["report"]
    assert watch.stalled == {"first"}
    fresh = replace(dying, life="second", beats=1, step=0, phase=Phase.START, age_seconds=0, limit_seconds=3600)
    for now in range(4, 3000):
        assert watch.decide(float(now), [replace(fresh, age_seconds=now - 4.0)]) == []
    assert watch.stalled == frozenset()


def test_who_goes_on_is_told_and_may_be_reported_again() -> None:
    plan = [*steady(200), Stay(Phase.STEP, 150), *steady(200), Stay(Phase.STEP, 150), *steady(20)]
    found = simulate([Rank(0, plan)], 700)
    assert kinds(found) == ["report", "recovered", "report", "recovered"]


@given(
    st.lists(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60), min_size=1, max_size=4),
    st.sampled_from([Phase.EVAL, Phase.COMPILE, Phase.OTHER, Phase.RESTORE]),
)
@settings(max_examples=60, deadline=None)
def test_nobody_is_suspected_within_the_limits(durations: list[list[float]], phase: Phase) -> None:
    ranks = [
        Rank(number, [Stay((Phase.STEP, phase)[i % 2], seconds) for i, seconds in enumerate(of_rank)])
        for number, of_rank in enumerate(durations)
    ]
    assert simulate(ranks, 500.0) == []  # the floor is 120 s


@given(st.integers(1, 4), st.data())
@settings(max_examples=60, deadline=None)
def test_whoever_stops_is_found_in_time_and_ended_once_and_last(world: int, data: st.DataObject) -> None:
    rules = replace(RULES, floor_seconds=20.0, grace_seconds=data.draw(st.floats(0.0, 30.0)))
    stops = [data.draw(st.integers(LEARNED, LEARNED + 50) | st.none()) for _ in range(world)]
    ranks = [
        Rank(rank, steady(1000) if stop is None else [*steady(stop, 0.5), hang()]) for rank, stop in enumerate(stops)
    ]
    found = simulate(ranks, 120.0, rules)
    for rank, stop in enumerate(stops):
        mine = [(now, action.what) for now, action in found if rank in ranks_of(action)]
        if stop is None:
            assert mine == []
            continue
        (reported, first), (ended, second) = mine
        assert (first, second) == ("report", "end")
        latest = rules.floor_seconds + (SETTLE_TICKS + 3) * rules.tick_seconds
        assert stop * 0.5 + rules.floor_seconds <= reported + rules.tick_seconds
        assert reported <= stop * 0.5 + latest
        assert ended - reported >= rules.grace_seconds


samples = st.builds(
    Sample,
    start=st.just(START),
    rank=st.integers(0, 3),
    life=st.sampled_from("abcd"),
    beats=st.integers(1, 3),
    step=st.integers(0, 3),
    phase=st.sampled_from(Phase),
    age_seconds=st.sampled_from([0.0, 5.0, 500.0, INF]),
    limit_seconds=st.sampled_from([1.0, 100.0]),
    busy=st.booleans(),
)


@given(st.lists(st.lists(samples, max_size=4, unique_by=lambda sample: sample.life), max_size=30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_whatever_is_seen_actions_concern_the_living_and_come_in_order(story: list[list[Sample]], end: bool) -> None:
    watch = Watch(WatchRules(end=end, grace_seconds=2.0))
    reported: dict[str, int] = {}
    for now, seen in enumerate(story):
        reported = {life: beats for life, beats in reported.items() if any(s.life == life for s in seen)}
        for action in watch.decide(float(now), seen):
            for sample in action.samples:
                assert sample in seen
                if action.what == "report":
                    assert not sample.busy
                    assert sample.phase is not Phase.CLOSED
                    assert reported.get(sample.life) is None
                    reported[sample.life] = sample.beats
                elif action.what == "recovered":
                    assert reported.pop(sample.life) != sample.beats
                else:
                    assert end
                    assert reported[sample.life] == sample.beats
        assert watch.stalled == set(reported)
