"""What comes after a failure, by a clock of the test's own."""

from __future__ import annotations

from ckptd.errors import CrashLoop, NeverStarted, RestartsUsedUp
from ckptd_client.launch.policy import Decision, Failure, Policy, RestartRules


def policy(**rules: float) -> Policy:
    return Policy(RestartRules(**rules), lambda number, first, longest: min(first * 2 ** (number - 1), longest))  # type: ignore[arg-type]


def failure(last_step: int | None, at_seconds: float = 0.0) -> Failure:
    return Failure(at_seconds=at_seconds, what="rank 0 died", stepped=last_step is not None, last_step=last_step)


def judged(found: Policy, *failures: Failure) -> list[Decision]:
    return [found.judge(one) for one in failures]


def whats(decisions: list[Decision]) -> list[str]:
    return [decision.what for decision in decisions]


def test_no_restart_before_a_first_step() -> None:
    (decision,) = judged(policy(), failure(None))
    assert isinstance(decision.error, NeverStarted)


def test_a_few_starts_may_fail_once_one_has_worked() -> None:
    decisions = judged(policy(unstarted_max=3), failure(5), failure(None), failure(None), failure(None))
    assert whats(decisions) == ["restart", "restart", "restart", "stop"]
    assert isinstance(decisions[-1].error, NeverStarted)


def test_the_same_step_again_goes_back_twice_and_then_stops() -> None:
    found = policy(same_step_max=3, back_max=2, restarts_max=100)
    decisions = judged(found, *(failure(30) for _ in range(9)))
    assert whats(decisions) == [
        "restart",
        "restart",
        "back",
        "restart",
        "restart",
        "back",
        "restart",
        "restart",
        "stop",
    ]
    assert isinstance(decisions[-1].error, CrashLoop)


def test_steps_that_differ_by_one_are_the_same_and_others_are_not() -> None:
    assert whats(judged(policy(same_step_max=3), failure(30), failure(31), failure(30))) == [
        "restart",
        "restart",
        "back",
    ]
    assert whats(judged(policy(same_step_max=2), failure(30), failure(34), failure(30))) == ["restart"] * 3


def test_progress_gives_all_chances_back() -> None:
    found = policy(same_step_max=2, back_max=1, restarts_max=100)
    assert whats(judged(found, failure(30), failure(30), failure(50), failure(50))) == ["restart", "back"] * 2


def test_the_budget_counts_within_a_window_only() -> None:
    found = policy(restarts_max=2, window_seconds=100)
    decisions = judged(found, failure(1, 0), failure(11, 10), failure(21, 20))
    assert whats(decisions) == ["restart", "restart", "stop"]
    assert isinstance(decisions[-1].error, RestartsUsedUp)
    found = policy(restarts_max=2, window_seconds=100)
    assert whats(judged(found, failure(1, 0), failure(11, 90), failure(21, 180))) == ["restart"] * 3


def test_the_first_restart_comes_at_once_and_later_ones_ever_later() -> None:
    decisions = judged(policy(backoff_seconds=1, backoff_seconds_max=3), *(failure(10 * n) for n in range(1, 6)))
    assert [decision.wait_seconds for decision in decisions] == [0, 1, 2, 3, 3]


def test_a_life_of_which_nothing_is_known_is_no_crash_loop() -> None:
    unknown = Failure(at_seconds=0, what="the group failed", stepped=True, last_step=None)
    assert whats(judged(policy(same_step_max=1), *[unknown] * 5)) == ["restart"] * 5
