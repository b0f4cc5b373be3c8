"""What lies in flat buffers is restored into any other layout, with real ranks: FSDP1, engines of the ZeRO kind, and
torch's own optimizer of that kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.client.conftest import Daemon
from tests.ranks.conftest import Rank, RankError, Ranks
from tests.ranks.test_parallel import Saved

Start = Callable[..., Daemon]
Spread = tuple[str, int]

STEPS = 3
OTHER = {"seed": 9, "lr": 0.9}
PADDING = 77.0
"""As in :mod:`tests.ranks.flat`, which is the ranks' to import."""


class Before(NamedTuple):
    """A run that was saved, and what it was."""

    url: str
    values: dict[str, str]


def begin(ranks: Ranks, folder: Path, socket: Path, url: str, spread: Spread, **options: Any) -> None:
    """Ranks in a process group of their own, with a training and a checkpointer."""
    kind, world = spread
    ranks.group(world, folder)
    ranks.open(url, world, socket, flat=kind, **options)


def end(ranks: Ranks) -> None:
    ranks.each("ungroup")


def values_of(ranks: Ranks) -> dict[str, str]:
    """All values, which every rank must gather alike."""
    answers = ranks.each("values")
    for answer in answers[1:]:
        assert answer["values"] == answers[0]["values"]
    values: dict[str, str] = answers[0]["values"]
    return values


def trained_on(ranks: Ranks) -> tuple[list[Any], dict[str, str]]:
    """Some steps, a save, and what as many further ones came to: each loss, and each value. Ends the ranks' turn."""
    ranks.run_and_save(STEPS)
    losses = ranks.each("run", steps=STEPS)
    after = values_of(ranks)
    end(ranks)
    return losses, after


def saved(ranks: Ranks, folder: Path, socket: Path, url: str, spread: Spread, **options: Any) -> Before:
    """A few steps, and a save of them."""
    begin(ranks, folder, socket, url, spread, **options)
    ranks.run_and_save(STEPS)
    before = Before(url, values_of(ranks))
    end(ranks)
    return before


def check_restored(ranks: Ranks, before: Before, source: str = "storage") -> None:
    """Restore on all ranks, and compare."""
    answers = ranks.each("restore")
    assert {(answer["step"], answer["source"]) for answer in answers} == {(STEPS, source)}
    values = values_of(ranks)
    assert {name for name in values if values[name] != before.values.get(name)} == set()
    assert set(values) == set(before.values)


FLAT = [(kind, world) for kind in ("fsdp1", "fsdp1_flat") for world in (1, 2, 3, 4)]
FLAT += [(kind, 4) for kind in ("hybrid", "hybrid_flat")]
FLAT += [("unsharded", 2), ("unsharded_flat", 3), ("grad_op", 3)]
OTHERS = [
    ("single", 1),
    ("ddp", 3),
    ("ddp", 4),
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("zero", 2),
    ("zero", 3),
    ("zero", 4),
    ("dp_tp", 4),
]


def name_of(spread: Spread) -> str:
    return f"{spread[0]}{spread[1]}"


@pytest.fixture(scope="module")
def runs(workers: list[Rank], daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> dict[Spread, Before]:
    """A run of each layout, saved; its snapshots stay with the daemon."""
    ranks = Ranks(workers)
    root = tmp_path_factory.mktemp("flat")
    return {
        spread: saved(ranks, root, daemon.socket, f"file://{root}/{name_of(spread)}", spread)
        for spread in [*FLAT, *OTHERS]
    }


def half(spreads: list[Spread]) -> list[Any]:
    """All of them, every other one only in the long run."""
    return [pytest.param(spread, marks=[pytest.mark.long] * (at % 2)) for at, spread in enumerate(spreads)]


@pytest.mark.parametrize("spread", half([*FLAT, *OTHERS]), ids=name_of)
def test_r111_any_layout_is_restored_into_this_one(
    ranks: Ranks, runs: dict[Spread, Before], own_daemon: Start, tmp_path: Path, spread: Spread
) -> None:
    """Every element of every parameter and moment, of tensors of 7 and 13 elements with padding between them; into an
    optimizer without state and into one that has some."""
    socket = own_daemon().socket
    at = [*FLAT, *OTHERS].index(spread)
    for number, (other, before) in enumerate(runs.items()):
        # All of those with as many ranks, as a rank then looks at its own tree first, and a third of all others.
        if other[1] != spread[1] and (number + at) % 3:
            continue
        begin(ranks, tmp_path, socket, before.url, spread, of={**OTHER, "warm": bool((number + at) // 3 % 2)})
        check_restored(ranks, before)
        end(ranks)


SAME = [*FLAT, ("zero", 2), ("zero", 3), ("dp_tp", 4), ("zero_one", 2), ("zero_one", 3)]


@pytest.mark.parametrize("source", ["storage", pytest.param("memory", marks=pytest.mark.long)])
@pytest.mark.parametrize("spread", half(SAME), ids=name_of)
def test_training_goes_on_bit_for_bit(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread, source: str
) -> None:
    socket = own_daemon().socket
    begin(ranks, tmp_path, socket, tmp_run, spread)
    losses, after = trained_on(ranks)
    if source == "storage":
        socket = own_daemon().socket
    # In its first step DDP adds up the gradients of three ranks in another order than in all later ones.
    warm = source == "memory" or spread[0] == "zero"
    begin(ranks, tmp_path, socket, tmp_run, spread, of={**OTHER, "warm": warm})
    assert {answer["source"] for answer in ranks.each("restore")} == {source}
    assert ranks.each("run", steps=STEPS) == losses
    assert values_of(ranks) == after


# Padding


@pytest.mark.parametrize("spread", [("fsdp1", 3), ("fsdp1_flat", 3), ("fsdp1_flat", 4), ("zero_one", 3)], ids=name_of)
def test_r111_padding_is_not_stored(ranks: Ranks, daemon: Daemon, tmp_path: Path, tmp_run: str, spread: Spread) -> None:
    """Each element is stored once, and no byte beside: not the value that all padding has."""
    before = saved(ranks, tmp_path, daemon.socket, tmp_run, spread)
    found = Saved(before.url, STEPS)
    parts = {"optimizer/": 0, "model/": 0, "masters/": 0}
    for layout in found.layouts:
        for entry in layout.tensors:
            for part in parts:
                if entry.name.startswith(part) and not entry.per_rank:
                    parts[part] += sum(piece.bytes for piece in entry.pieces)
    tensors = {name: value for name, value in found.tensors().items() if name.startswith(tuple(parts))}
    assert not any((value == PADDING).any() for value in tensors.values())
    cut = [(e.name, p.span) for layout in found.layouts for e in layout.tensors for p in e.pieces if p.span is not None]
    row = {"up.weight": 7, "down.weight": 13}
    assert any(span.start % width for name, span in cut for of, width in row.items() if name.endswith(of))
    moments = {name: value for name, value in tensors.items() if "exp_avg" in name}
    assert moments
    assert all(name.startswith("optimizer/state/") for name in moments)
    assert parts["optimizer/"] >= sum(value.nbytes for value in moments.values())
    assert parts["optimizer/"] <= sum(value.nbytes for value in moments.values()) + 4 * len(moments)  # and steps


# Engines of the ZeRO kind


@pytest.mark.parametrize("idle", [0, 400])
@pytest.mark.parametrize(("world", "other"), [(3, 2), (2, 3), (2, 4), (4, 1), (1, 3), (4, 4)])
def test_r111_a_flat_partition_is_cut_anew(
    ranks: Ranks, daemon: Daemon, own_daemon: Start, tmp_path: Path, tmp_run: str, world: int, other: int, idle: int
) -> None:
    """Masters and moments of every element, and what is replicated beside them. With 400 idle elements at the end of
    the line, a rank of four has nothing but these."""
    of = {"idle": idle} if world == 4 else {}
    before = saved(ranks, tmp_path, daemon.socket, tmp_run, ("zero_one", world), of=of, replicated=["model/*"])
    for source, socket in (("storage", own_daemon().socket), ("memory", daemon.socket)):
        of = {**OTHER, "warm": source == "memory", **({"idle": idle} if other == 4 else {})}
        begin(ranks, tmp_path, socket, tmp_run, ("zero_one", other), of=of, replicated=["model/*"])
        check_restored(ranks, before, source)
        end(ranks)


# Equal parts that nothing declares to be equal


@pytest.mark.parametrize("spread", [("single", 1), ("fsdp2", 3), ("dp_tp", 4), ("fsdp1", 4)], ids=name_of)
def test_what_tensor_parallelism_left_alone_is_stored_once(
    ranks: Ranks, daemon: Daemon, own_daemon: Start, tmp_path: Path, tmp_run: str, spread: Spread
) -> None:
    before = saved(ranks, tmp_path, daemon.socket, tmp_run, ("dp_tp", 4))
    for source, socket in (("storage", own_daemon().socket), ("memory", daemon.socket)):
        begin(ranks, tmp_path, socket, tmp_run, spread, of=OTHER)
        check_restored(ranks, before, source)
        end(ranks)


def test_what_tensor_parallelism_left_alone_and_is_not_equal_refuses_the_commit(
    ranks: Ranks, daemon: Daemon, tmp_path: Path, tmp_run: str
) -> None:
    begin(ranks, tmp_path, daemon.socket, tmp_run, ("dp_tp", 4))
    ranks.each("restore")
    ranks.each("run", steps=1)
    ranks[3].do("shift_element", name="bias")
    with pytest.raises(RankError, match=r"model/bias.*ranks? \d"):
        ranks.each("save_as_it_is", step=1)
