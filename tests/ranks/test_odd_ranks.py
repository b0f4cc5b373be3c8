"""Ranks that differ from each other: pipeline stages, experts, and values of a rank's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon, committed
from tests.ranks.conftest import RankError, Ranks

Start = Callable[..., Daemon]

OTHER = {"seed": 50}


def saved(ranks: Ranks, socket: Path, url: str, world: int, odd: str, **options: Any) -> list[dict[str, str]]:
    """Train, save, and say what each rank had."""
    ranks.open(url, world, socket, odd=odd, **options)
    ranks.each("restore")
    ranks.each("run", steps=2)
    ranks.each("save_as_it_is", step=2)
    values = values_of(ranks)
    ranks.each("close")
    return values


def values_of(ranks: Ranks) -> list[dict[str, str]]:
    """By rank."""
    return [answer["values"] for answer in ranks.each("values")]


def reopened(ranks: Ranks, socket: Path, url: str, world: int, odd: str, **options: Any) -> None:
    """Another start, with other values and an optimizer that has state."""
    options["of"] = {**OTHER, **options.get("of", {})}
    ranks.open(url, world, socket, odd=odd, **options)
    ranks.each("run", steps=1)


def united(of_ranks: list[dict[str, str]]) -> dict[str, str]:
    """What all ranks have, which must be the same where several have it."""
    found: dict[str, str] = {}
    for values in of_ranks:
        assert {name for name in values if found.setdefault(name, values[name]) != values[name]} == set()
    return found


# Stages


@pytest.mark.parametrize(
    ("world", "source"),
    [
        (3, "storage"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [(1, "memory"), (2, "memory"), (3, "memory"), (4, "memory")]
        ),
        *(pytest.param(world, "storage", marks=pytest.mark.long) for world in (1, 2, 4)),
    ],
)
def test_stages_are_restored_into_any_other_stages(
    ranks: Ranks, others: Ranks, daemon: Daemon, own_daemon: Start, tmp_run: str, world: int, source: str
) -> None:
    """The embedding is tied to the head, which is in the last stage; who has both, has them tied."""
    before = united(saved(ranks, daemon.socket, tmp_run, world, "stages"))
    socket = daemon.socket if source == "memory" else own_daemon().socket
    spreads = [("stages", 1), ("stages", 2), ("stages", 3), ("stages", 4), ("whole", 2), ("whole", 3), ("whole", 4)]
    for odd, other in spreads:
        reopened(others, socket, tmp_run, other, odd)
        assert {answer["source"] for answer in others.each("restore")} == {source}
        after = united(values_of(others))
        tied = "state/head.weight/", "group/head.weight"
        for name, value in after.items():
            known = name if name in before or not name.startswith(tied) else name.replace("head", "embed")
            assert before[known] == value, name
        assert all(name in after or name.startswith(tied) for name in before)
        others.each("close")


def test_stages_whose_tied_parameters_differ_are_not_tied(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    """Neither where the values differ, nor where only the optimizer's state does."""
    ranks.open(tmp_run, 2, daemon.socket, odd="stages")
    ranks.each("restore")
    ranks.each("run", steps=2)
    ranks[1].do("shift", field="exp_avg")
    ranks.each("save_as_it_is", step=2)
    ranks.each("close")
    reopened(ranks, daemon.socket, tmp_run, 1, "stages")
    with pytest.raises(RankError, match=r"optimizer/state/head.weight/exp_avg \(tied to optimizer/state/embed.weight"):
        ranks[0].do("restore")


# A rank's own


@pytest.mark.parametrize("source", [pytest.param("memory", marks=pytest.mark.long), "storage"])
@pytest.mark.parametrize(("odd", "own"), [("experts", "expert"), ("flags", "seen")])
def test_what_is_a_ranks_own_returns_to_that_rank_only(
    ranks: Ranks,
    others: Ranks,
    daemon: Daemon,
    own_daemon: Start,
    tmp_run: str,
    odd: str,
    own: str,
    source: str,
) -> None:
    """Of one name, and with another value on each of two ranks. On another number of ranks it is an error that names
    it; excluded, the rest is restored."""
    before = saved(ranks, daemon.socket, tmp_run, 2, odd)
    socket = daemon.socket if source == "memory" else own_daemon().socket
    for other in (1, 3):
        reopened(others, socket, tmp_run, other, odd)
        with pytest.raises(RankError, match=rf"model/{own}[^ ]* \(each of 2 ranks had its own value, and there are"):
            others.each("restore")
        others.each("close")
        reopened(others, socket, tmp_run, other, odd)
        live = values_of(others)
        assert {a["source"] for a in others.each("restore", exclude=[f"*/{own}*"])} == {source}
        for rank, values in enumerate(values_of(others)):
            for name, value in values.items():
                if "group/" not in name:
                    assert value == (live[rank] if own in name else before[0])[name], name
        others.each("close")
    reopened(others, socket, tmp_run, 2, odd)
    assert {answer["source"] for answer in others.each("restore")} == {source}
    assert values_of(others) == before
    assert before[0] != before[1]
    others.each("close")


def test_a_rank_that_had_none_of_what_others_had_of_their_own(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    """A rank that now has a layer which it did not save takes it from the one that did; not where two had two."""
    saved(ranks, daemon.socket, tmp_run, 3, "some")
    reopened(ranks, daemon.socket, tmp_run, 3, "experts")
    with pytest.raises(RankError, match=r"rank 0: .*model/expert.weight \(each of 3 ranks .*and this one had none"):
        ranks.each("restore")


def test_experts_of_one_name_that_were_declared_equal_are_not_committed(
    ranks: Ranks, daemon: Daemon, tmp_run: str
) -> None:
    """Each expert has the name that it has on its rank, and the run says that all its tensors are replicas."""
    ranks.open(tmp_run, 2, daemon.socket, odd="experts", replicated=True, check_replicas=True)
    ranks.each("restore")
    ranks.each("run", steps=1)
    with pytest.raises(RankError, match=r"expert\.(weight|bias).*ranks? 0.*1"):
        ranks.each("save_as_it_is", step=1)
    assert committed(tmp_run) == []
    ranks.kill()
