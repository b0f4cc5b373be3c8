"""Distributed tensors: which part each rank saves, and that it finds its part again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.errors import MismatchError, StateError
from ckptd.format.cover import check_cover
from ckptd.format.records import Box, IndexPiece
from ckptd_client.capture import Leaf, State
from tests.client.roundtrip import assert_same, restore, save

WORLD = 4
As = Callable[[int], None]


@pytest.fixture
def as_rank() -> Iterator[As]:
    """Makes this process take the part of a rank, alone: collectives do nothing."""

    def take_part(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)

    yield take_part
    if dist.is_initialized():
        dist.destroy_process_group()


def distributed(local: torch.Tensor, shape: tuple[int, ...], placements: list[Any], mesh_shape: tuple[int, ...]) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def the_leaf(state: dict[str, Any]) -> Leaf:
    (leaf,) = State(state, world=WORLD, rng=False).capture().leaves
    return leaf


def test_r11_a_rank_that_owns_nothing_has_seen_the_tensor(as_rank: As) -> None:
    """A tensor of shape (1, 8) over four ranks: three own nothing, and all of them restore."""
    pieces: list[IndexPiece] = []
    for rank in range(WORLD):
        as_rank(rank)
        local = torch.arange(8.0).reshape(1, 8) if rank == 0 else torch.empty(0, 8)
        tensor = distributed(local, (1, 8), [Shard(0)], (WORLD,))
        leaf = the_leaf({"x": tensor})
        assert (leaf.name, leaf.shape, leaf.per_rank) == ("x", (1, 8), False)
        assert leaf.box is not None
        assert tuple(leaf.tensor.shape) == leaf.box.lengths == ((1, 8) if rank == 0 else (0, 8))
        stored = save({"x": tensor}, world=WORLD)
        (entry,) = stored.layout.tensors
        pieces += [IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank) for p in entry.pieces]
        fresh = distributed(torch.zeros_like(local), (1, 8), [Shard(0)], (WORLD,))
        report = restore(stored, {"x": fresh}, world=WORLD).report
        assert report.loaded == ("x",)
        assert torch.equal(fresh.to_local(), local)
        with pytest.raises(MismatchError, match="missing from the checkpoint: y"):
            restore(stored, {"x": fresh, "y": torch.zeros(1)}, world=WORLD)
    check_cover("x", (1, 8), pieces)


@pytest.mark.parametrize(
    ("shape", "placements", "mesh"),
    [
        ((7, 3), [Shard(0)], (4,)),
        ((7, 5), [Shard(0), Shard(1)], (2, 2)),
        ((5, 3), [Replicate(), Shard(0)], (2, 2)),
        ((), [Replicate()], (4,)),
        ((3,), [Replicate(), Replicate()], (2, 2)),
    ],
)
def test_the_ranks_parts_cover_a_tensor_exactly_once(
    as_rank: As, shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...]
) -> None:
    pieces: list[IndexPiece] = []
    for rank in range(WORLD):
        as_rank(rank)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        lengths, _ = compute_local_shape_and_global_offset(torch.Size(shape), init_device_mesh("cpu", mesh), placements)
        leaf = the_leaf({"x": distributed(torch.zeros(lengths), shape, placements, mesh)})
        if leaf.box is not None:
            assert leaf.tensor.numel() == (torch.empty(leaf.box.lengths).numel())
        pieces.append(IndexPiece(at=0, box=leaf.box, bytes=0, rank=rank, span=leaf.span))
    check_cover("x", shape, pieces)


def test_a_sum_that_is_not_reduced_is_refused(as_rank: As) -> None:
    as_rank(0)
    with pytest.raises(StateError, match="x: a DTensor with a partial placement"):
        save({"x": distributed(torch.ones(2), (2,), [Partial()], (WORLD,))}, world=WORLD)


def test_a_fully_sharded_model_and_its_optimizer(as_rank: As) -> None:
    as_rank(1)

    def make() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer}

    state, fresh = make(), make()
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    live = State(state, world=WORLD, rng=False)
    leaves = {leaf.name: leaf for leaf in live.capture().leaves}
    assert leaves["model/0.weight"].box == Box((2, 0), (2, 6))
    assert leaves["optimizer/state/0.weight/momentum_buffer"].box == Box((2, 0), (2, 6))
    assert leaves["model/0.weight"].fenced
    assert live.capture().leaves is live.capture().leaves
    stored = save(state, world=WORLD)
    restore(stored, fresh, world=WORLD)
    assert_same(save(fresh, world=WORLD), stored)
    moment = fresh["optimizer"].state[fresh["model"][0].weight]["momentum_buffer"]
    assert isinstance(moment, DTensor)
    assert moment.placements == (Shard(0),)
