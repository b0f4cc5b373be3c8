"""What counts as a bad loss, on histories of any kind."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import ConfigError
from ckptd.pulse.loss_rules import BadLoss, LossJudge, LossRules

RULES = LossRules(window_steps=40, warm_steps=10)


def heard(losses: list[float], rules: LossRules = RULES, column: str = "loss") -> list[BadLoss]:
    """Of steps from 1 on."""
    judge = LossJudge(rules)
    return [bad for step, loss in enumerate(losses, 1) for bad in judge.hear(step, {column: loss})]


def falling(steps: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    chance = random.Random(seed)
    return [2.0 + 8.0 * math.exp(-step / 50) + chance.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.2])
def test_a_training_that_gets_on_is_never_bad(seed: int, noise: float) -> None:
    assert heard(falling(500, seed, noise)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["loss", "grad_norm"])
def test_what_is_not_finite_is_bad_at_once_and_told_once(value: float, column: str) -> None:
    found = heard([*falling(30), value, value, value, *falling(5), value], column=column)
    assert [(bad.column, bad.first_step, bad.step) for bad in found] == [(column, 31, 31), (column, 39, 39)]
    assert found[0].what == f"{column} is {value:g}"


def test_other_columns_may_be_anything() -> None:
    assert heard([math.nan, 1e300, -math.inf] * 20, column="temperature") == []
    assert LossJudge(RULES).hear(1, {}) == []


def test_a_single_spike_passes_and_a_lasting_one_is_bad_from_its_first_step() -> None:
    calm = falling(100)
    assert heard([*calm, 90.0, 90.0, *falling(50)[40:]]) == []
    (bad,) = heard([*calm, 90.0, 80.0, 95.0, 90.0, 91.0])
    assert (bad.first_step, bad.step) == (101, 103)
    assert "95" in bad.what


def test_a_new_level_is_told_once_and_then_learned() -> None:
    found = heard([*falling(100), *(50.0 + 0.01 * (step % 7) for step in range(300)), 500.0, 500.0, 500.0])
    assert [bad.first_step for bad in found] == [101, 401]


def test_nan_in_between_ends_no_spike_and_begins_none() -> None:
    found = heard([*falling(100), 90.0, math.nan, 90.0, 90.0])
    assert [(bad.first_step, bad.step) for bad in found] == [(102, 102), (101, 104)]


def test_a_loss_without_scale_cannot_spike() -> None:
    assert heard([0.0] * 100 + [1.0] * 100) == []


def test_below_is_never_too_high() -> None:
    assert heard([*falling(100), *[-1000.0] * 20]) == []


@settings(max_examples=200, deadline=None)
@given(
    losses=st.lists(st.floats(min_value=-1e6, max_value=1e6) | st.sampled_from([math.nan, math.inf]), max_size=150),
    rules=st.builds(
        LossRules,
        window_steps=st.integers(10, 30),
        warm_steps=st.integers(1, 10),
        spike_steps=st.integers(1, 5),
        finite_steps=st.integers(1, 3),
        deviations=st.floats(0.5, 50),
        floor_share=st.floats(0, 1),
    ),
)
def test_whatever_is_told_is_so(losses: list[float], rules: LossRules) -> None:
    for bad in heard(losses, rules):
        stretch = [losses[step - 1] for step in range(bad.first_step, bad.step + 1)]
        if not math.isfinite(stretch[-1]):
            assert len(stretch) == rules.finite_steps
            assert not any(map(math.isfinite, stretch))
        else:
            high = [value for value in stretch if math.isfinite(value)]
            before = [value for value in losses[: bad.first_step - 1] if math.isfinite(value)]
            assert len(high) == rules.spike_steps
            assert len(before) >= rules.warm_steps
            assert min(high) > min(before)


@settings(max_examples=100, deadline=None)
@given(losses=st.lists(st.floats(min_value=0.1, max_value=10), min_size=20, max_size=60), scale=st.floats(1e-3, 1e3))
def test_the_unit_of_the_loss_does_not_matter(losses: list[float], scale: float) -> None:
    """As far as rounding goes: nothing here is within a millionth of its limit."""
    judge = LossJudge(RULES)
    for step, loss in enumerate(losses):
        limit = judge.limit("loss")
        if math.isfinite(limit) and abs(loss - limit) < 1e-6 * (abs(limit) + abs(median(losses))):
            return
        judge.hear(step, {"loss": loss})
    plain, scaled = heard(losses), heard([loss * scale for loss in losses])
    assert [(bad.first_step, bad.step) for bad in plain] == [(bad.first_step, bad.step) for bad in scaled]


@pytest.mark.parametrize(
    "wrong",
    [
        {"finite_steps": 0},
        {"spike_steps": 201},
        {"warm_steps": 0},
        {"window_steps": 10**6},
        {"deviations": 0.0},
        {"deviations": math.nan},
        {"floor_share": -1.0},
    ],
)
def test_rules_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossRules(**wrong)  # type: ignore[arg-type]
