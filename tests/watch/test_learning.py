"""What is learned of a run: durations, limits, stragglers; and what becomes of stored ones that are damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.watch.durations import REMEMBERED, Durations
from ckptd.daemon.watch.learned import KEEP_SECONDS, Learned
from ckptd.daemon.watch.rules import LEARNED_MIN, WatchRules
from ckptd.daemon.watch.stragglers import STEPS_MIN, lagging
from ckptd.limits import HANG_FIRST_SECONDS, HANG_FLOOR_SECONDS
from ckptd.pulse import Phase


@given(st.lists(st.floats(1e-4, 1e6), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_a_quantile_is_never_too_short_and_at_most_a_fifth_too_long(values: list[float], fraction: float) -> None:
    durations = Durations()
    for value in values:
        durations.add(value)
    least = sorted(values)[max(-(-fraction * len(values) // 1) - 1, 0).__int__()]
    found = durations.quantile_seconds(fraction)
    assert least * 0.999 <= found <= least * 1.2
    assert Durations(durations.stored()).quantile_seconds(fraction) == found


def test_a_few_outliers_move_no_limit_and_a_lasting_change_does() -> None:
    durations = Durations()
    for number in range(20_000):
        durations.add(900.0 if number % 500 == 0 else 1.0)
    assert durations.quantile_seconds(0.99) < 1.2
    assert durations.count <= REMEMBERED
    for _ in range(500):
        durations.add(30.0)
    assert durations.quantile_seconds(0.99) >= 30.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_left_out(value: float) -> None:
    durations = Durations()
    durations.add(value)
    assert (durations.count, durations.quantile_seconds(0.5)) == (0, 0.0)


def test_limits_by_phase() -> None:
    rules = WatchRules()
    learned = {Phase.STEP: Durations(), Phase.EVAL: Durations()}

    def limit(phase: Phase, *, warm: bool = True, given: float = 0.0) -> float:
        return rules.limit_seconds(phase, learned, warm=warm, given=given)

    assert limit(Phase.STEP) == HANG_FIRST_SECONDS  # nothing is known yet
    for _ in range(LEARNED_MIN):
        learned[Phase.STEP].add(1.0)
        learned[Phase.EVAL].add(2000.0)
    assert limit(Phase.STEP) == HANG_FLOOR_SECONDS
    assert limit(Phase.STEP, warm=False) == HANG_FIRST_SECONDS
    assert limit(Phase.STEP, given=7.0) == limit(Phase.EVAL, given=7.0) == 7.0
    assert limit(Phase.EVAL) >= 5 * 2000.0  # learned beyond the default
    assert limit(Phase.COMPILE) == limit(Phase.RESTORE) == limit(Phase.START) == HANG_FIRST_SECONDS
    for _ in range(200):
        learned[Phase.STEP].add(100.0)
    assert limit(Phase.STEP) >= 500.0


def test_what_was_learned_is_kept_and_what_is_damaged_is_learned_anew(tmp_path: Path) -> None:
    first = Learned(tmp_path / "limits")
    for _ in range(30):
        first.add("file:///run", Phase.STEP, 2.0)
    first.add("file:///run", Phase.START, 9.0)  # not learned
    first.keep(0.0)
    first.add("file:///run", Phase.STEP, 2.0)
    first.keep(KEEP_SECONDS / 2)  # too soon
    second = Learned(tmp_path / "limits").of("file:///run")
    assert (set(second), second[Phase.STEP].count) == ({Phase.STEP}, 30)
    (path,) = (tmp_path / "limits").iterdir()
    for damaged in (b"", b"[]", b'{"run":"x","phases":{"step":{"a":-1}}}', path.read_bytes()[:-9]):
        path.write_bytes(damaged)
        assert Learned(tmp_path / "limits").of("file:///run") == {}


def test_old_runs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.daemon.watch.learned.LEARNED_RUNS_KEPT", 5)
    learned = Learned(tmp_path)
    for number in range(8):
        learned.add(f"file:///{number}", Phase.STEP, 1.0)
        learned.keep(float(number), at_once=True)
        (newest,) = [path for path in tmp_path.iterdir() if path.stat().st_mtime > 1e6]
        os.utime(newest, (number, number))
    assert len(list(tmp_path.iterdir())) == 5
    assert Learned(tmp_path).of("file:///2") == {}
    assert Learned(tmp_path).of("file:///3") != {}


def test_a_straggler_is_named_with_how_slow_it_is_and_stays_one_until_it_has_caught_up() -> None:
    others = {rank: [1.0] * STEPS_MIN for rank in range(3)}
    assert lagging({**others, 3: [1.6] * STEPS_MIN}, 1.5) == {3: pytest.approx(1.6)}
    assert lagging({**others, 3: [1.3] * STEPS_MIN}, 1.5) == {}
    assert lagging({**others, 3: [1.3] * STEPS_MIN}, 1.5, lagged={3}) == {3: pytest.approx(1.3)}
    assert lagging({**others, 3: [1.2] * STEPS_MIN}, 1.5, lagged={3}) == {}
    assert lagging({**others, 3: [9.0] * (STEPS_MIN - 1)}, 1.5) == {}  # too little is known of it
    assert lagging({0: [9.0] * STEPS_MIN}, 1.5) == {}  # nobody to compare it with
    assert lagging({0: [0.001] * STEPS_MIN, 1: [0.005] * STEPS_MIN}, 1.5) == {}  # noise
