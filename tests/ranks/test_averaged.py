"""What lies beside a model and its optimizer, with real ranks: low precision under FSDP, running statistics, and
averages of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Daemon
from tests.ranks.conftest import RankError, Ranks
from tests.ranks.test_flat import (
    OTHER,
    STEPS,
    Spread,
    begin,
    check_restored,
    end,
    name_of,
    saved,
    trained_on,
    values_of,
)

Start = Callable[..., Daemon]


def check_goes_on(
    ranks: Ranks, own_daemon: Start, folder: Path, url: str, spread: Spread, of: dict[str, Any], *, warm: bool
) -> None:
    """Restored by as many ranks, from storage, it trains on as if nothing had been: in every loss and every value."""
    begin(ranks, folder, own_daemon().socket, url, spread, of=of)
    losses, after = trained_on(ranks)
    begin(ranks, folder, own_daemon().socket, url, spread, of={**of, **OTHER, "warm": warm})
    assert {answer["source"] for answer in ranks.each("restore")} == {"storage"}
    assert ranks.each("run", steps=STEPS) == losses
    assert values_of(ranks) == after
    end(ranks)


HALVES = [("half", 2), ("half_flat", 3), ("half_unsharded", 2), ("half_hybrid", 4)]


def called(value: object) -> str:
    """In the name of a test."""
    return name_of(value) if isinstance(value, tuple) else str(value)


def some(variants: list[Any], *default: int) -> list[Any]:
    """All of them, but for a few only in the long run."""
    return [pytest.param(*one, marks=[] if at in default else [pytest.mark.long]) for at, one in enumerate(variants)]


@pytest.mark.parametrize(
    ("spread", "warm"), some([(spread, warm) for warm in (False, True) for spread in HALVES], 0, 5), ids=called
)
def test_low_precision_with_running_statistics_goes_on_bit_for_bit(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread, warm: bool
) -> None:
    """FSDP turns the statistics to bfloat16 in its first forward: a fresh process has them in single precision, and one
    that has trained has not."""
    check_goes_on(ranks, own_daemon, tmp_path, tmp_run, spread, {"norm": True}, warm=warm)


@pytest.mark.parametrize("spread", some([(("fsdp1", 2),), (("fsdp1_flat", 3),), (("fsdp2", 2),)], 1), ids=name_of)
def test_running_statistics_are_each_ranks_own(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread
) -> None:
    """On as many ranks each has its own again. Another number of ranks is told which values have no owner, and takes
    the rest."""
    of = {"norm": True}
    check_goes_on(ranks, own_daemon, tmp_path, tmp_run, spread, of, warm=True)
    socket = own_daemon().socket
    begin(ranks, tmp_path, socket, tmp_run, (spread[0], 4), of={**of, **OTHER})
    world = spread[1]
    with pytest.raises(RankError, match=rf"norm\.running_mean \(each of {world} ranks had its own value") as raised:
        ranks.each("restore")
    assert raised.value.kind == "MismatchError"
    end(ranks)
    begin(ranks, tmp_path, socket, tmp_run, (spread[0], 4), of={**of, **OTHER})
    answers = ranks.each("restore", exclude=["model/norm.running_*"])
    assert {answer["step"] for answer in answers} == {STEPS}
    end(ranks)


@pytest.mark.parametrize(
    ("spread", "other"),
    some(
        [
            (("half", 2), ("half_flat", 3)),
            (("half_flat", 3), ("single", 1)),
            (("half_unsharded", 2), ("fsdp2", 4)),
            (("single", 1), ("half", 4)),
            (("fsdp2", 2), ("half_hybrid", 4)),
            (("ddp", 3), ("half_unsharded", 2)),
        ],
        0,
    ),
    ids=name_of,
)
def test_low_precision_is_no_part_of_a_checkpoint(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread, other: Spread
) -> None:
    """What is kept in single precision goes from any layout to any other."""
    before = saved(ranks, tmp_path, own_daemon().socket, tmp_run, spread)
    for warm in (False, True):
        begin(ranks, tmp_path, own_daemon().socket, tmp_run, other, of={**OTHER, "warm": warm})
        check_restored(ranks, before)
        end(ranks)


# Averages


AVERAGED = [("ddp", 2), ("fsdp1", 3), ("fsdp1_flat", 2), ("fsdp2", 4), ("half", 2)]


@pytest.mark.parametrize(
    ("spread", "averaged"),
    some([(spread, kind) for kind in ("module", "dict") for spread in AVERAGED], 1, 8),
    ids=called,
)
def test_an_average_goes_on_bit_for_bit(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread, averaged: str
) -> None:
    check_goes_on(ranks, own_daemon, tmp_path, tmp_run, spread, {"averaged": averaged}, warm=True)


@pytest.mark.parametrize(
    ("spread", "other"),
    some(
        [
            (("ddp", 2), ("fsdp1", 3)),
            (("fsdp1", 3), ("fsdp2", 2)),
            (("fsdp1_flat", 2), ("single", 1)),
            (("fsdp2", 4), ("fsdp1_flat", 2)),
            (("single", 1), ("ddp", 3)),
        ],
        1,
    ),
    ids=name_of,
)
def test_an_averaged_model_goes_to_any_layout(
    ranks: Ranks, daemon: Daemon, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread, other: Spread
) -> None:
    """It is another one than the raw model, and comes back beside it."""
    of = {"averaged": "module"}
    before = saved(ranks, tmp_path, daemon.socket, tmp_run, spread, of=of)
    name = "blocks.0.up.weight"
    assert before.values[f"average/{name}"] != before.values[f"model/{name}"]
    for source, socket in (("storage", own_daemon().socket), ("memory", daemon.socket)):
        begin(ranks, tmp_path, socket, tmp_run, other, of={**of, **OTHER, "warm": source == "memory"})
        check_restored(ranks, before, source)
        end(ranks)


@pytest.mark.parametrize("spread", some([(("fsdp1", 2),), (("fsdp1_flat", 2),)], 0), ids=name_of)
def test_an_average_of_mere_shards_is_each_ranks_own(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread
) -> None:
    """Nothing says of which tensors such shards are parts: another number of ranks is told so, by name."""
    saved(ranks, tmp_path, own_daemon().socket, tmp_run, spread, of={"averaged": "dict"})
    begin(ranks, tmp_path, own_daemon().socket, tmp_run, (spread[0], 3), of={"averaged": "dict", **OTHER})
    with pytest.raises(RankError, match=r"shadow/") as raised:
        ranks.each("restore")
    assert raised.value.kind == "MismatchError"
    end(ranks)
