"""Who meets whom, and who is named for what was found: by records alone."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.cli.preflight_command import print_report
from ckptd.health.report import Check, Member, Outcome, Pair, Report
from ckptd.health.tournament import ROUNDS_MAX, rounds
from ckptd.health.verdict import judge, merged

BAD, FAULT = 14, 11


@given(st.integers(1, 40))
def test_every_two_meet_once_and_nobody_is_twice_in_a_round(world: int) -> None:
    found = rounds(world, rounds_max=world)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(world), 2))
    for pairs in found:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) >= world - 1 - world % 2


@settings(max_examples=15)
@given(st.integers(10, 3000))
def test_in_a_large_world_everybody_meets_a_few(world: int) -> None:
    found = rounds(world)
    assert len(found) == ROUNDS_MAX
    met = [pair for pairs in found for pair in pairs]
    assert len(set(met)) == len(met) >= ROUNDS_MAX * (world // 2 - 1)


def world_of(
    count: int,
    *,
    outcomes: dict[tuple[int, int], Outcome] | None = None,
    rates: dict[tuple[int, int], float] | None = None,
    skews: dict[int, float] | None = None,
    checks: dict[int, Check] | None = None,
    missing: set[int] = frozenset(),  # type: ignore[assignment]
) -> Report:
    """The verdict on a world in which all is well but for what is said. Two ranks share a node."""
    outcomes, rates, skews, checks = outcomes or {}, rates or {}, skews or {}, checks or {}
    members = []
    for rank in sorted(set(range(count)) - missing):
        own = tuple(
            Pair(
                ranks=ranks,
                outcome="absent" if missing & set(ranks) else outcomes.get(ranks, "well"),
                bytes_per_second=rates.get(ranks, 1e9),
                skew_seconds=skews.get(ranks[1], 0.0) - skews.get(ranks[0], 0.0),
                error="refused" if ranks in outcomes else "",
            )
            for ranks in combinations(range(count), 2)
            if rank in ranks
        )
        check = checks.get(rank, Check(level="ok", subject="disk", message="fine", shared=True))
        members.append(Member(rank=rank, node=f"n{rank // 2}", checks=(check,), pairs=own))
    return judge(count, {rank: f"n{rank // 2}" for rank in range(count)}, members)


def named(report: Report) -> dict[str, tuple[int, ...]]:
    return {node.node: node.ranks for node in report.bad_nodes}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_nobody_is_named_where_all_is_well(count: int) -> None:
    report = world_of(count)
    assert (report.exit_code, report.bad_nodes, report.faults) == (0, (), ())


@pytest.mark.parametrize("bad", range(4))
def test_who_reaches_nobody_is_named(bad: int) -> None:
    report = world_of(4, outcomes={tuple(sorted((bad, other))): "failed" for other in range(4) if other != bad})  # type: ignore[misc]
    assert (named(report), report.exit_code) == ({f"n{bad // 2}": (bad,)}, BAD)


def test_one_broken_link_is_nobodys() -> None:
    report = world_of(4, outcomes={(0, 1): "failed"})
    assert named(report) == {}


def test_where_nobody_reaches_anybody_no_node_is_blamed() -> None:
    report = world_of(3, outcomes=dict.fromkeys(combinations(range(3), 2), "failed"))
    assert (named(report), report.exit_code) == ({}, FAULT)
    assert report.faults == ("no two ranks reach each other: refused",)
    assert world_of(2, outcomes={(0, 1): "failed"}).exit_code == FAULT


@pytest.mark.parametrize("missing", range(3))
def test_who_is_silent_is_named_and_drags_nobody_along(missing: int) -> None:
    report = world_of(3, missing={missing})
    assert named(report) == {f"n{missing // 2}": (missing,)}
    assert named(world_of(2, missing={1})) == {"n0": (1,)}


def test_who_never_said_a_name_is_named_by_rank() -> None:
    report = judge(3, {0: "a", 1: "b"}, [Member(rank=0, node="a"), Member(rank=1, node="b")])
    assert [(node.node, node.ranks, node.reasons) for node in report.bad_nodes] == [("", (2,), ("rank 2: never came",))]


@pytest.mark.parametrize("bad", range(4))
def test_who_is_slow_with_everybody_is_named(bad: int) -> None:
    slow = {ranks: 1e8 for ranks in combinations(range(4), 2) if bad in ranks}
    report = world_of(4, rates=slow)
    assert named(report) == {f"n{bad // 2}": (bad,)}
    assert "slow with all it met: at best 100.0 MB/s, where 1000.0 are usual" in report.bad_nodes[0].reasons[0]
    assert named(world_of(4, rates={(0, 1): 1e8})) == {}, "one slow link"
    assert named(world_of(2, rates={(0, 1): 1e8})) == {}, "nothing to compare with"


@pytest.mark.parametrize("bad", range(3))
def test_whose_clock_is_off_is_named(bad: int) -> None:
    report = world_of(3, skews={bad: -70.0})
    assert named(report) == {f"n{bad // 2}": (bad,)}
    assert "its clock differs by -70.0 s" in report.bad_nodes[0].reasons[0]
    two = world_of(2, skews={1: 70.0})
    assert (named(two), two.exit_code) == ({}, FAULT)
    assert "nobody can say whose" in two.faults[0]


def test_what_is_shared_is_blamed_on_a_node_only_where_others_have_it() -> None:
    broken = Check(level="error", subject="disk", message="read-only", shared=True)
    assert named(world_of(4, checks={3: broken})) == {"n1": (3,)}
    everywhere = world_of(4, checks=dict.fromkeys(range(4), broken))
    assert (named(everywhere), everywhere.faults, everywhere.exit_code) == ({}, ("disk: read-only",), FAULT)
    own = Check(level="error", subject="CPU matmul", message="wrong")
    assert named(world_of(4, checks=dict.fromkeys(range(4), own))) == {"n0": (0, 1), "n1": (2, 3)}


def test_a_slow_gpu_is_bad_and_a_slow_store_a_warning() -> None:
    def rate(place: str, value: float) -> Check:
        return Check(level="ok", subject="x", message="", place=place, figures={"flops_per_second": value})

    gpus = world_of(4, checks={rank: rate("GPU 0", 1e12 if rank else 1e11) for rank in range(4)})
    assert named(gpus) == {"n0": (0,)}
    host = world_of(4, checks={rank: rate("host", 1e12 if rank else 1e11) for rank in range(4)})
    assert named(host) == {}
    assert host.warnings == ("rank 0: slow: x, flops_per_second 1e+11, where 1e+12 is usual",)


def test_what_two_ranks_say_of_one_meeting_is_merged() -> None:
    (pair,) = merged(
        [
            Pair(ranks=(0, 1), outcome="well", bytes_per_second=5.0, skew_seconds=0.1),
            Pair(ranks=(0, 1), outcome="failed", bytes_per_second=0.0, skew_seconds=-2.0, error="timed out"),
        ]
    )
    assert (pair.outcome, pair.bytes_per_second, pair.skew_seconds, pair.error) == ("failed", 0.0, -2.0, "timed out")


def test_the_table_names_nodes_ranks_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    failing = Check(level="error", subject="lost", message="it does not answer", place="GPU 3 [uuid]")
    report = world_of(4, checks={3: failing}, missing={0}, rates={(1, 2): 3 * 2**30})
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["0", "-", "bad"],
        ["1", "n0", "well"],
        ["2", "n1", "well"],
        ["3", "n1", "bad"],
    ]
    assert "3.0 GiB/s" in lines[2]
    assert lines[5:] == [
        "bad node: n0",
        "  rank 0: did not answer",
        "bad node: n1",
        "  rank 3: GPU 3 [uuid]: it does not answer",
    ]
