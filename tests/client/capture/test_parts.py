"""What each rank of a mesh holds of a tensor, against torch's own cutting; and who holds the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.errors import StateError
from ckptd.format.cover import check_cover
from ckptd.format.records import Box, IndexPiece, decode_layout
from ckptd_client.capture import Capture, Part, State
from ckptd_client.staging.plan import Plan

As = Callable[[int, int], None]


@pytest.fixture
def as_rank() -> Iterator[As]:
    """Makes this process take the part of one rank of a world, alone: collectives do nothing."""

    def take_part(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield take_part
    if dist.is_initialized():
        dist.destroy_process_group()


def place_on(mesh: DeviceMesh) -> tuple[int, ...]:
    """Of the rank that this process plays: torch remembers the last one's in tensors."""
    return tuple((mesh.mesh == dist.get_rank()).nonzero()[0].tolist())


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Each element is its own place in row-major order."""
    return torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)


def captured(tensor: Any, world: int) -> Capture:
    return State({"x": tensor}, world=world, rng=False).capture()


def the_part(tensor: Any, world: int) -> Part:
    return captured(tensor, world).parts["x"]


def check_part(part: Part, whole: torch.Tensor) -> None:
    """What is held is what the boxes say, element by element."""
    for piece in part.each():
        box = piece.box or Box((0,) * whole.dim(), tuple(whole.shape))
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
        assert torch.equal(piece.local, whole[place])


def stored_once(shape: tuple[int, ...], captures: list[Capture]) -> None:
    """The shards of all ranks hold each element once."""
    pieces = [
        IndexPiece(at=piece.at, box=piece.box, bytes=piece.bytes, rank=rank, span=piece.span)
        for rank, capture in enumerate(captures)
        for entry in decode_layout(Plan.of(capture).layout).tensors
        for piece in entry.pieces
    ]
    check_cover("x", shape, pieces)


placements = st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(2)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 7), st.integers(1, 4)),
    mesh_shape=st.sampled_from([(4,), (2, 3), (3, 2), (2, 2, 2)]),
    kinds=st.tuples(placements, placements, placements),
)
def test_r113_any_sharding_on_any_mesh(
    as_rank: As, shape: tuple[int, ...], mesh_shape: tuple[int, ...], kinds: tuple[Any, ...]
) -> None:
    whole, world = numbered(shape), math.prod(mesh_shape)
    captures: list[Capture] = []
    for rank in range(world):
        as_rank(rank, world)
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(whole, mesh, kinds[: len(mesh_shape)], src_data_rank=None)
        captures.append(captured(tensor, world))
        part = captures[-1].parts["x"]
        check_part(part, whole)
        alike = mesh.mesh[
            tuple(
                slice(None) if kind.is_replicate() else place
                for kind, place in zip(kinds, place_on(mesh), strict=False)
            )
        ]
        assert part.replicas == tuple(sorted(alike.flatten().tolist()))
    stored_once(shape, captures)


def test_r113_two_dimensions_that_do_not_divide(as_rank: As) -> None:
    """Five by seven, over two by three ranks."""
    captures: list[Capture] = []
    for rank in range(6):
        as_rank(rank, 6)
        tensor = distribute_tensor(
            numbered((5, 7)), init_device_mesh("cpu", (2, 3)), [Shard(0), Shard(1)], src_data_rank=None
        )
        captures.append(captured(tensor, 6))
        check_part(captures[-1].parts["x"], numbered((5, 7)))
    stored_once((5, 7), captures)
    assert [capture.parts["x"].box for capture in captures][3:] == [
        Box((3, 0), (2, 3)),
        Box((3, 3), (2, 3)),
        Box((3, 6), (2, 1)),
    ]


@pytest.mark.parametrize("rows", range(1, 14))
def test_r113_the_strided_order_of_fsdp_over_tensor_parallelism(as_rank: As, rows: int) -> None:
    """The inner dimension of the mesh cuts first, so that a rank's part is several boxes."""
    whole, captures = numbered((rows, 3)), list[Capture]()
    for rank in range(6):
        as_rank(rank, 6)
        mesh = init_device_mesh("cpu", (3, 2))
        outer, inner = place_on(mesh)
        local = whole
        order = [_StridedShard(0, split_factor=2), Shard(0)]
        for placement, count, place in zip(order, (3, 2), (outer, inner), strict=True):
            shards, _ = placement._split_tensor(local, count, with_padding=False)
            local = shards[place]
        tensor = DTensor.from_local(local, mesh, order, run_check=False, shape=whole.shape, stride=whole.stride())
        captures.append(captured(tensor, 6))
        check_part(captures[-1].parts["x"], whole)
    stored_once((rows, 3), captures)


def test_a_tensor_in_the_order_of_another_sharding(as_rank: As) -> None:
    """Both dimensions of the mesh shard one of the tensor, the second one first."""
    whole = numbered((8, 2))
    for rank in range(4):
        as_rank(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        outer, inner = place_on(mesh)
        place = inner * 2 + outer
        local = whole[2 * place : 2 * place + 2].clone()
        tensor: Any = DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False)
        from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

        tensor._spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        check_part(the_part(tensor, 4), whole)


def test_ranks_outside_the_mesh_have_seen_the_tensor(as_rank: As) -> None:
    captures: list[Capture] = []
    for rank in range(4):
        as_rank(rank, 4)
        mesh = DeviceMesh("cpu", [1, 3])
        captures.append(captured(distribute_tensor(numbered((5, 2)), mesh, [Shard(0)], src_data_rank=None), 4))
    stored_once((5, 2), captures)
    assert [capture.parts["x"].replicas for capture in captures] == [(), (1,), (), (3,)]


def test_shards_cut_otherwise_than_torch_does_are_refused(as_rank: As) -> None:
    as_rank(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(
        torch.zeros(1, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 2)), stride=(2, 1)
    )
    with pytest.raises(StateError, match=r"x: this rank holds \(1, 2\) of \(6, 2\)"):
        captured(tensor, 2)


# Data parallelism


class Net(nn.Module):
    """Parameters, running statistics, and a parameter that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def replicas(state: dict[str, Any], world: int = 4, **options: Any) -> dict[str, tuple[int, ...]]:
    return {
        name: part.replicas for name, part in State(state, world=world, rng=False, **options).capture().parts.items()
    }


def stepped(parameters: Any, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    optimizer: torch.optim.Optimizer = kind([p for p in parameters if p.requires_grad], **options)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_data_parallel_parameters_and_their_state_are_replicas(as_rank: As) -> None:
    as_rank(1, 4)
    model = nn.ModuleDict({"inner": DistributedDataParallel(Net()), "beside": nn.Linear(2, 2)})
    optimizer = stepped(model.parameters(), torch.optim.Adafactor, lr=0.1)
    found = replicas({"model": model, "optimizer": optimizer, "other": torch.zeros(1)})
    assert found["model/inner.linear.weight"] == found["model/inner.frozen"] == (0, 1, 2, 3)
    assert found["model/beside.weight"] == found["other"] == ()
    state = {name: ranks for name, ranks in found.items() if name.startswith("optimizer/state/inner.")}
    assert len(state) == 9  # of factored shapes too
    assert set(state.values()) == {(0, 1, 2, 3)}
    assert found["optimizer/state/beside.weight/step"] == ()


def test_data_parallel_buffers_are_the_first_ranks(as_rank: As) -> None:
    for rank in (0, 1):
        as_rank(rank, 2)
        capture = State({"model": DistributedDataParallel(Net())}, world=2, rng=False).capture()
        part = capture.parts["model/norm.running_mean"]
        assert part.led
        saved = {leaf.name for leaf in capture.leaves if leaf.tensor.numel() and "norm.r" in leaf.name}
        assert saved == ({"model/norm.running_mean", "model/norm.running_var"} if rank == 0 else set())
        apart = DistributedDataParallel(Net())
        apart.broadcast_buffers = False
        own = State({"model": apart}, world=2, rng=False).capture()
        assert own.parts["model/norm.running_mean"].replicas == ()
        assert {leaf.per_rank for leaf in own.leaves if leaf.name == "model/norm.running_mean"} == {True}


def test_data_parallelism_over_a_part_of_the_world_and_what_it_leaves_out(as_rank: As) -> None:
    as_rank(3, 6)
    group = dist.new_group([1, 3, 5])
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["frozen"])
    found = replicas({"model": DistributedDataParallel(net, process_group=group)}, 6)
    assert found["model/linear.weight"] == (1, 3, 5)
    assert found["model/frozen"] == ()


def test_composable_replicate(as_rank: As) -> None:
    from torch.distributed._composable import replicate

    as_rank(1, 2)
    net = Net()
    replicate(net)
    before = replicas({"model": net}, 2)
    net.forward = lambda x: net.linear(x)  # type: ignore[method-assign]
    net(torch.zeros(1, 4)).sum().backward()
    assert before == replicas({"model": net}, 2)
    assert before["model/linear.weight"] == (0, 1)
    assert before["model/norm.running_mean"] == ()


def test_data_over_tensor_parallelism(as_rank: As) -> None:
    """Torch keeps the local parts as parameters then. One is sharded over the inner mesh, one replicated on it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for rank in range(4):
        as_rank(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(2, 2)})
        parallelize_module(net, mesh["tp"], {"a": ColwiseParallel()})
        net["b"].weight = nn.Parameter(
            distribute_tensor(torch.ones(2, 2), mesh["tp"], [Replicate()], src_data_rank=None)
        )
        model = DistributedDataParallel(net, device_mesh=mesh["dp"])
        optimizer = stepped(model.parameters())
        state = State({"model": model, "optimizer": optimizer}, world=4, rng=False)
        parts = state.capture().parts
        columns = (0, 2) if rank % 2 == 0 else (1, 3)
        for name in ("model/a.weight", "optimizer/state/a.weight/exp_avg"):
            assert parts[name].replicas == columns
            assert parts[name].box == Box((3 * (rank % 2), 0), (3, 4))
        assert parts["model/b.weight"].replicas == (0, 1, 2, 3)
        assert parts["optimizer/state/a.weight/step"].replicas == (0, 1, 2, 3)


def test_what_the_caller_declares(as_rank: As) -> None:
    as_rank(0, 2)
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": stepped(model.parameters()), "ema": {"weight": torch.zeros(2)}}
    assert set(replicas(state, 2).values()) == {()}
    assert set(replicas(state, 2, replicated=True).values()) == {(0, 1)}
    found = replicas(state, 2, replicated=("model/*", "*/weight/step"))
    assert {name for name, ranks in found.items() if ranks} == {
        "model/weight",
        "model/bias",
        "optimizer/state/weight/step",
    }


# Cutting


def test_shares_are_cut_again_where_the_memory_moves(as_rank: As) -> None:
    """A tensor that lies elsewhere keeps its cuts: the structure is the same object, the leaves are others."""
    as_rank(1, 2)
    model = nn.Linear(1024, 1024)
    state = State({"model": model}, world=2, rng=False, replicated=True)
    before = state.capture()
    (leaf,) = [leaf for leaf in before.leaves if leaf.name == "model/weight" and leaf.tensor.numel()]
    assert leaf.box == Box((512, 0), (512, 1024))
    model.weight.data = model.weight.data.clone()
    after = state.capture()
    assert after.structure is before.structure
    assert after.leaves is not before.leaves
    (moved,) = [leaf for leaf in after.leaves if leaf.name == "model/weight" and leaf.tensor.numel()]
    assert moved.tensor.data_ptr() == model.weight.data[512:].data_ptr()
    assert (moved.box, moved.fenced, moved.per_rank) == (leaf.box, leaf.fenced, False)
    assert state.capture().leaves is after.leaves


def test_another_wrapping_of_the_same_tensors_is_another_structure(as_rank: As) -> None:
    as_rank(0, 2)
    net = nn.Linear(4, 4)
    state: dict[str, Any] = {"model": net}
    live = State(state, world=2, rng=False)
    before = live.capture()
    state["model"] = DistributedDataParallel(net)
    after = live.capture()
    assert set(before.parts) == set(after.parts)
    assert before.structure is not after.structure
    assert after.parts["model/weight"].replicas == (0, 1)


def test_r23_frozen_parameters_are_saved_however_they_are_sharded(as_rank: As) -> None:
    for rank, (shape, kinds) in product(range(2), [((5, 3), [Shard(0)]), ((5, 3), [Replicate()])]):
        as_rank(rank, 2)
        model = nn.Linear(3, 5)
        tensor = distribute_tensor(numbered(shape).float(), init_device_mesh("cpu", (2,)), kinds, src_data_rank=None)
        model.weight = nn.Parameter(tensor, requires_grad=False)
        optimizer = torch.optim.SGD([model.bias], lr=0.1)
        capture = State({"model": model, "optimizer": optimizer}, world=2, rng=False).capture()
        check_part(capture.parts["model/weight"], numbered(shape).float())
        assert "model/weight" in {leaf.name for leaf in capture.leaves}


def test_r117_lists_that_differ_by_rank_are_each_ranks_own() -> None:
    """Of lengths 1 and 5, with numbers and tensors in them."""
    for rank, length in enumerate((1, 5)):
        state = {"seen": list(range(length)), "queue": [torch.full((2,), rank) for _ in range(length)]}
        capture = State(state, world=2, rank=rank, rng=False).capture()
        tree = dict(msgspec.json.decode(capture.tree)["v"])
        assert tree["seen"] == list(range(length))
        assert [leaf.name for leaf in capture.leaves] == [f"queue/~l{i}" for i in range(length)]
        assert all(leaf.per_rank for leaf in capture.leaves)
