"""Flat buffers that hold parts of many tensors: ranges are saved under the tensors' own names, padding is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ckptd.errors import StateError
from ckptd.format.cover import check_cover
from ckptd.format.records import IndexPiece, Span
from ckptd_client import FlatPartition, FlatSlice
from ckptd_client.capture import State

SHAPES = {"a": (7,), "b": (13,), "c": (3, 5)}
ALIGNED = 4


def line(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    """Where each tensor begins on a flat line, each padded to a multiple of four; and how long the line is."""
    starts: dict[str, int] = {}
    at = 0
    for name, shape in shapes.items():
        starts[name] = at
        at += -(-torch.Size(shape).numel() // ALIGNED) * ALIGNED
    return starts, at


def partition(rank: int, world: int, values: dict[str, torch.Tensor]) -> FlatPartition:
    """A rank's equal share of the line, as an engine of the ZeRO kind cuts it; padding is -1."""
    starts, total = line(SHAPES)
    share = -(-total // world)
    whole = torch.full((share * world,), -1.0)
    for name, start in starts.items():
        whole[start : start + values[name].numel()] = values[name].flatten()
    begin = rank * share
    slices: list[FlatSlice] = []
    for name, start in starts.items():
        first, last = max(start, begin), min(start + values[name].numel(), begin + share)
        if first < last:
            slices.append(FlatSlice(name, SHAPES[name], first - start, last - start, first - begin))
        else:
            slices.append(FlatSlice(name, SHAPES[name], 0, 0, 0))
    return FlatPartition(whole[begin : begin + share].clone(), slices)


def values(seed: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=numbers) for name, shape in SHAPES.items()}


def put_together(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """All tensors of the captures of all ranks, each element once."""
    pieces: dict[str, list[tuple[IndexPiece, torch.Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, state in enumerate(states):
        for leaf in State(state, world=len(states), rank=rank, rng=False).capture().leaves:
            shapes[leaf.name] = leaf.shape
            of_it = pieces.setdefault(leaf.name, [])
            if leaf.tensor.numel():
                of_it.append((IndexPiece(at=0, box=leaf.box, bytes=0, rank=rank, span=leaf.span), leaf.tensor))
    found: dict[str, torch.Tensor] = {}
    for name, of_it in pieces.items():
        check_cover(name, shapes[name], [piece for piece, _ in of_it])
        found[name] = torch.empty(shapes[name]).flatten()
        for piece, tensor in of_it:
            assert isinstance(piece.span, Span)
            found[name][piece.span.start : piece.span.stop] = tensor
        found[name] = found[name].view(shapes[name])
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_r111_flat_shards_with_padding_are_saved_as_the_tensors_that_they_hold(world: int) -> None:
    """Tensors of 7, 13 and 15 elements, padded to four, cut through anywhere: every element of every moment."""
    moments = {"exp_avg": values(1), "exp_avg_sq": values(2)}
    states = [
        {"zero": {field: partition(rank, world, of_it) for field, of_it in moments.items()}} for rank in range(world)
    ]
    found = put_together(states)
    assert set(found) == {f"zero/{field}/{name}" for field in moments for name in SHAPES}
    for field, of_it in moments.items():
        for name, value in of_it.items():
            assert torch.equal(found[f"zero/{field}/{name}"], value)


def test_r111_the_state_of_a_flat_parameter_is_taken_apart_likewise() -> None:
    """ZeRO 1 by hand: each rank's optimizer has its share of the line as its only parameter."""
    states: list[dict[str, Any]] = []
    optimizers: list[torch.optim.Optimizer] = []
    for rank in range(3):
        share = partition(rank, 3, values(0))
        share.buffer = nn.Parameter(share.buffer)
        optimizers.append(torch.optim.Adam([share.buffer], lr=0.1))
        share.buffer.grad = torch.arange(len(share.buffer)).float() + 100 * rank
        optimizers[-1].step()
        states.append({"master": share, "optimizer": optimizers[-1]})
    captures = [State(state, world=3, rank=rank, rng=False).capture() for rank, state in enumerate(states)]
    starts, total = line(SHAPES)
    flat = torch.cat([next(iter(o.state.values()))["exp_avg"] for o in optimizers])
    assert len(flat) >= total
    for name, shape in SHAPES.items():
        whole = torch.full((torch.Size(shape).numel(),), torch.nan)
        for capture in captures:
            part = capture.parts.get(f"optimizer/state/{name}/exp_avg")
            if part is not None and part.span is not None:
                assert part.shape == shape
                whole[part.span.start : part.span.stop] = part.local
        assert torch.equal(whole, flat[starts[name] : starts[name] + len(whole)])
        assert capture.parts[f"master/{name}"].shape == shape
    members = [dict(msgspec.json.decode(capture.tree)["v"])["optimizer"] for capture in captures]
    in_group = [[["a", 0], ["b", 0]], [["b", 0], ["c", 0]], [["c", 0]]]  # what a rank has any element of
    assert [dict(of_it["v"])["members"]["v"] for of_it in members] == in_group
    assert all(leaf.fenced for capture in captures for leaf in capture.leaves)
    assert not any(capture.aliases for capture in captures)  # what the ranges have in common is saved with each


def test_a_buffer_that_moves_is_found_again() -> None:
    share = partition(0, 1, values(3))
    live = State({"x": share}, world=1, rng=False)
    before = live.capture()
    assert live.capture().leaves is before.leaves
    share.buffer = share.buffer.clone()
    after = live.capture()
    assert after.structure is before.structure
    assert all(
        leaf.tensor.untyped_storage().data_ptr() == share.buffer.untyped_storage().data_ptr() for leaf in after.leaves
    )


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([FlatSlice("a", (7,), 0, 8, 0)], "a: elements 0 to 8 of a tensor of shape"),
        ([FlatSlice("a", (7,), 0, 7, 4)], "a: places 4 to 11 overlap"),
        ([FlatSlice("a", (7,), 0, 3, 0), FlatSlice("b", (7,), 0, 3, 2)], "b: places 2 to 5 overlap"),
        ([FlatSlice("a", (7,), 0, 3, 0), FlatSlice("a", (7,), 3, 7, 3)], "two slices of a flat buffer"),
    ],
)
def test_slices_that_cannot_be(slices: list[FlatSlice], message: str) -> None:
    with pytest.raises(StateError, match=message):
        FlatPartition(torch.zeros(8), slices)
