"""Nodes that tell each other of the end of a start, and agree on the next, through a real store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore

from ckptd.errors import CrashLoop
from ckptd_client.launch import council as module
from ckptd_client.launch.council import Council, News, Report, Ruling, merged
from ckptd_client.launch.policy import History

FAILED = Report(what="local rank 0 was killed by SIGKILL", died_unix_seconds=20.0, stepped=True, last_step=12)
FOLLOWED = Report(died_unix_seconds=21.0, stepped=True, last_step=13)


class Meeting:
    """A store, and councils that have a connection to it each."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def councils(self, nodes: int) -> list[Council]:
        """One for each node."""
        stores = [TCPStore("127.0.0.1", self.store.port, is_master=False) for _ in range(nodes)]
        return [Council(PrefixStore("start", store), node, nodes) for node, store in enumerate(stores)]


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    found = Meeting()
    yield found
    with contextlib.suppress(AttributeError):
        del found.store


def test_news_reach_all_others_once_and_in_one_order(meeting: Meeting) -> None:
    first, second, third = meeting.councils(3)
    first.tell("failed", "a")
    third.tell("stopping", "b")
    assert second.hear() == [News("failed", 0, "a"), News("stopping", 2, "b")]
    assert first.hear() == [News("stopping", 2, "b")]
    second.tell("joining", "c")
    assert second.hear() == []
    assert third.hear() == [News("failed", 0, "a"), News("joining", 1, "c")]


def test_one_node_judges_by_what_all_say_and_all_do_the_same(meeting: Meeting) -> None:
    seen: list[Mapping[int, Report]] = []

    def judge(reports: Mapping[int, Report]) -> Ruling:
        seen.append(reports)
        return Ruling.stop(CrashLoop("again", hint="look"), History(stepped=True, restarts=[1.5], at=13))

    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(each.settle, report, judge)
            for each, report in zip(meeting.councils(2), (FOLLOWED, FAILED), strict=True)
        ]
        rulings = [call.result(60) for call in calls]
    assert seen == [{0: FOLLOWED, 1: FAILED}]
    assert rulings[0] == rulings[1]
    assert isinstance(rulings[1].outcome, CrashLoop)
    assert rulings[1].history == History(stepped=True, restarts=[1.5], at=13)


def test_who_knows_nothing_of_the_start_leaves_the_judging_to_others(meeting: Meeting) -> None:
    with ThreadPoolExecutor(2) as pool:
        late, knows = meeting.councils(2)
        unheard = pool.submit(late.settle, Report(what="local rank 0 ended with exit code 1"), _never)
        assert knows.settle(FAILED, lambda _: Ruling(wait_seconds=3.0)) == unheard.result(60)


def test_a_dead_node_is_not_waited_for(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.3)
    lives, _ = meeting.councils(2)
    words: list[str] = []

    def judge(reports: Mapping[int, Report]) -> Ruling:
        words.append(merged(reports, 2).what)
        return Ruling()

    assert lives.settle(FAILED, judge).outcome is None
    assert words == ["node 0: local rank 0 was killed by SIGKILL; node 1 is silent"]


def test_where_the_judge_dies_another_one_judges(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RULING_SECONDS", 0.3)
    dies, lives = meeting.councils(2)
    dies.report(FAILED)

    def died(_: Mapping[int, Report]) -> Ruling:
        raise KeyboardInterrupt

    lives.report(FOLLOWED)
    with pytest.raises(KeyboardInterrupt):
        dies.settle(FAILED, died)
    assert lives.settle(FOLLOWED, lambda _: Ruling(wait_seconds=7.0)).wait_seconds == 7.0


def test_without_a_store_a_node_decides_alone(meeting: Meeting) -> None:
    (alone, _) = meeting.councils(2)
    alone.tell("failed", "a")
    del meeting.store
    assert alone.hear() == []
    assert alone.settle(FAILED, lambda _: Ruling(wait_seconds=1.0)).wait_seconds == 1.0


def test_what_all_say_becomes_one_failure() -> None:
    early = Report(what="local rank 1 ended with exit code 3", died_unix_seconds=19.0, stepped=True, last_step=12)
    found = merged({0: FAILED, 1: early, 2: FOLLOWED}, 3)
    assert found.what == "node 1: local rank 1 ended with exit code 3; node 0: local rank 0 was killed by SIGKILL"
    assert (found.stepped, found.last_step) == (True, 13)
    assert merged({0: FAILED}, 1).what == FAILED.what
    assert merged({0: FOLLOWED}, 1).what == "the group failed"


def _never(_: Mapping[int, Report]) -> Ruling:
    raise AssertionError("it knows nothing")
