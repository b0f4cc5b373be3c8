"""Several ranks whose stores are slower than they save: what is let go, and that what remains is whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.client.conftest import Daemon, committed
from tests.ranks.conftest import Ranks

Start = Callable[..., Daemon]

COMMITS, LATEST = 7, 4
STEPS_MAX = 50_000
TRAINING: dict[str, Any] = {"width": 64, "slots": 1, "every_steps": 1}
"""Of 100 KB."""
POLICIES: list[dict[str, Any]] = [{"on_full": "skip"}, {"on_full": "fail"}, {"on_full": "wait", "max_wait": 0.001}]


def named(policy: dict[str, Any]) -> str:
    return str(policy["on_full"])


@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_commits_keep_coming_where_each_rank_lets_saves_go(
    ranks: Ranks, own_daemon: Start, tmp_run: str, policy: dict[str, Any]
) -> None:
    """Two nodes, whose stores take a save in many steps, and not in the same time. Without an order in what they let go
    they meet by chance alone: then the steps are any."""
    nodes = [own_daemon("--bandwidth", "1.2"), own_daemon("--bandwidth", "0.8")]
    ranks.open(tmp_run, 2, [node.socket for node in nodes], **TRAINING, **policy)
    ranks.each("restore")
    step = let_go = 0
    while len(committed(tmp_run)) < COMMITS and step < STEPS_MAX:
        answers = ranks.each("train_on", first=step + 1, last=step + 10)
        step += 10
        let_go += sum(answer["let_go"] for answer in answers)
    found = committed(tmp_run)
    assert len(found) >= COMMITS
    assert [each for each in found[-LATEST:] if each % 4] == []
    assert let_go > step, "each second save and more"
    ranks.each("close_anyway")


@pytest.mark.parametrize("policy", POLICIES[:2], ids=named)
def test_a_pinned_save_is_tried_whatever_the_spacing(
    ranks: Ranks, own_daemon: Start, tmp_run: str, policy: dict[str, Any]
) -> None:
    stalled = own_daemon("--bandwidth", "0.001")
    ranks.open(tmp_run, 2, stalled.socket, **TRAINING, **policy)
    ranks.each("restore")
    ranks.train(1, 3)
    ranks.each("save", step=5, pin=True)
    ranks.each("save", step=7, debug=True)
    fates = {step: ranks.each("fate", step=step) for step in (1, 2, 3, 5, 7)}
    ranks.kill()
    os.kill(stalled.pid, signal.SIGKILL)  # it would try to write what it has until its patience ends
    expected = {"skip": "SaveSkipped", "fail": "SaveError"}[policy["on_full"]]
    assert {fate["state"] for fate in fates[1]} == {"sealed"}
    assert {fate["kind"] for step in (2, 3, 5, 7) for fate in fates[step]} == {expected}
    assert all("the store is behind" in fate["message"] for fate in fates[3]), "it was left out"
    assert all("no free slot" in fate["message"] for step in (2, 5, 7) for fate in fates[step]), "they were tried"


@pytest.mark.parametrize("policy", POLICIES[:2], ids=named)
def test_the_last_save_before_a_stop_waits_for_its_slot(
    ranks: Ranks, own_daemon: Start, tmp_run: str, policy: dict[str, Any]
) -> None:
    nodes = [own_daemon("--bandwidth", "0.06"), own_daemon("--bandwidth", "0.04")]
    sockets = [node.socket for node in nodes]
    ranks.open(tmp_run, 2, sockets, **TRAINING, **policy, max_wait=60, stop_on=["SIGTERM"])
    ranks.each("restore")
    ranks.train(1, 40)
    ranks[1].signal(signal.SIGTERM)
    (step,) = {answer["step"] for answer in ranks.each("train_to_the_stop", first=41, pause_seconds=0.02)}
    ranks.each("wait", step=step)
    assert committed(tmp_run)[-1] == step
    ranks.each("close")
