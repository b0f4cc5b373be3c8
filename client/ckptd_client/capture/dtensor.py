"""Distributed tensors: which part of the global tensor this rank holds, and which ranks hold the same."""

# torch keeps how a DTensor is made up to itself
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ckptd.errors import StateError
from ckptd.format.records import Box
from ckptd_client.capture.parts import Part, bare, holds_nothing

Run = tuple[int, int]
"""Offset and length of consecutive indices along one dimension."""


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor. Imports nothing: without the module there can be no DTensor."""
    if type(tensor) in _PLAIN:  # nearly all, and a state may have a hundred thousand
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of the tensor: the tensor itself unless it is a DTensor."""
    if not is_distributed(tensor):
        return tensor
    local = cast(Any, tensor)._local_tensor  # to_local() would enter the autograd graph
    return cast(torch.Tensor, local.wait() if hasattr(local, "wait") else local)  # wait: a collective in flight


def spec_of(tensor: torch.Tensor) -> Any | None:
    """How the tensor is distributed; ``None`` for one that is not. Data parallelism over tensor parallelism keeps the
    local tensors as parameters between two forwards, and notes at each what it is a part of."""
    return cast(Any, tensor)._spec if is_distributed(tensor) else getattr(tensor, "_st_info", None)


def distributed_part(name: str, spec: Any, held: torch.Tensor, meshes: Meshes, group: tuple[int, ...] = ()) -> Part:
    """What this rank holds of a tensor that is distributed as ``spec`` says. ``group``: ranks among which whoever
    trains it keeps it equal as well.

    Raises :class:`StateError` for sums that are not yet reduced, and for a placement of an unknown kind.
    """
    mesh, placements, shape = spec.mesh, spec.placements, tuple(spec.shape)
    _refuse_unknown(name, placements)
    local = bare(held)
    coordinate = meshes.coordinate(mesh)
    if coordinate is None:
        return holds_nothing(local, shape)
    replicated = tuple(placement.is_replicate() for placement in placements)
    replicas = meshes.ranks(mesh, replicated, group)
    if all(replicated):
        return Part(local, shape, None, None, replicas)
    runs_held = held_runs(shape, _steps(spec, coordinate))
    lengths = tuple(sum(length for _, length in runs) for runs in runs_held)
    if tuple(local.shape) != lengths:
        raise StateError(
            f"{name}: this rank holds {tuple(local.shape)} of {shape}, where its placements make {lengths}",
            hint="give from_local() the shape and the stride of the whole tensor, and shards as torch.chunk cuts them",
        )
    parts = [Part(piece, shape, box, None, replicas) for box, piece in _boxes(runs_held, local)]
    return Part(parts[0].local, shape, parts[0].box, None, replicas, more=tuple(parts[1:]))


def _refuse_unknown(name: str, placements: Sequence[Any]) -> None:
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if any(placement.is_partial() for placement in placements):
        raise StateError(f"{name}: a DTensor with a partial placement is not a value yet", hint="redistribute it first")
    for placement in placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise StateError(f"{name}: a DTensor with a placement of an unknown kind, {placement}")


Step = tuple[int, int, int, int]
"""One sharding: tensor dimension, into how many chunks first, into how many shards each of these, and which is ours."""


def _steps(spec: Any, coordinate: Sequence[int]) -> list[Step]:
    """The shardings of a DTensor, in the order in which they apply."""
    placements = spec.placements
    order = [number for number, placement in enumerate(placements) if not placement.is_replicate()]
    other_order = getattr(spec, "shard_order", None)
    if other_order:
        order = [number for entry in other_order for number in entry.mesh_dims]
    return [
        (
            placements[number].dim,
            getattr(placements[number], "split_factor", 1),
            spec.mesh.shape[number],
            coordinate[number],
        )
        for number in order
    ]


def held_runs(shape: tuple[int, ...], steps: Sequence[Step]) -> list[list[Run]]:
    """For each dimension the indices that a rank holds, in the order in which it holds them.

    Shards are cut as by ``torch.chunk``: all as long as the first, but for the last ones. Where there are several, a
    sharding cuts what the one before has left.
    """
    held: list[list[Run]] = [[(0, size)] for size in shape]
    for dim, chunks, shards, place in steps:
        size = sum(length for _, length in held[dim])
        taken: list[Run] = []
        for number in range(chunks):
            start, length = _chunk(size, chunks, number)
            within, length = _chunk(length, shards, place)
            taken += _slice(held[dim], start + within, length)
        held[dim] = _joined(taken)
    return held


def _chunk(size: int, parts: int, number: int) -> Run:
    step = -(-size // parts)
    start = min(step * number, size)
    return start, min(step, size - start)


def _slice(runs: Sequence[Run], start: int, length: int) -> list[Run]:
    """The runs of so many elements of the line that ``runs`` make, from ``start`` on."""
    found: list[Run] = []
    for offset, size in runs:
        taken = min(length, size - start)
        if taken > 0 and start >= 0:
            found.append((offset + start, taken))
            length -= taken
            start = 0
        else:
            start -= size
        if not length:
            break
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for offset, length in runs:
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined


def _boxes(held: Sequence[Sequence[Run]], local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that the runs of all dimensions make, and the view of each in what the rank holds."""
    if not local.numel():
        # An empty part may be given any offset; where it starts must still lie inside the tensor.
        return [(Box(tuple(runs[0][0] if runs else 0 for runs in held), tuple(local.shape)), local)]
    boxes: list[tuple[Box, torch.Tensor]] = []
    placed = [list(zip(_starts(runs), runs, strict=True)) for runs in held]
    for choice in itertools.product(*placed):
        view = local
        for dim, (start, (_, length)) in enumerate(choice):
            view = view.narrow(dim, start, length)
        boxes.append((Box(tuple(run[0] for _, run in choice), tuple(run[1] for _, run in choice)), view))
    return boxes


def _starts(runs: Sequence[Run]) -> list[int]:
    return [0, *itertools.accumulate(length for _, length in runs)][:-1]


class Meshes:
    """Which ranks are alike on a mesh, found out once for each kind of placement."""

    def __init__(self) -> None:
        self._places: dict[Any, tuple[int, ...] | None] = {}
        self._known: dict[tuple[Any, tuple[bool, ...], tuple[int, ...]], tuple[int, ...]] = {}

    def coordinate(self, mesh: Any) -> tuple[int, ...] | None:
        """Where this rank is on the mesh; ``None`` outside."""
        if mesh not in self._places:
            self._places[mesh] = _place(mesh.mesh, dist.get_rank())
        return self._places[mesh]

    def ranks(self, mesh: Any, free: tuple[bool, ...], group: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The ranks that differ from this one in the free dimensions of the mesh only, ascending; and, of each of
        these, those that belong together with it as ``group`` does with this rank."""
        key = (mesh, free, group)
        if key not in self._known:
            coordinate = self.coordinate(mesh)
            assert coordinate is not None
            self._known[key] = _together(mesh, coordinate, free, group)
        return self._known[key]

    def everyone(self, mesh: Any, group: tuple[int, ...] = ()) -> tuple[int, ...]:
        """All ranks of a mesh; empty for a rank outside."""
        if self.coordinate(mesh) is None:
            return ()
        return self.ranks(mesh, (True,) * mesh.ndim, group)


def _together(
    mesh: Any, coordinate: tuple[int, ...], free: tuple[bool, ...], group: tuple[int, ...]
) -> tuple[int, ...]:
    ranks: torch.Tensor = mesh.mesh
    own = int(ranks[coordinate])
    alike = ranks[tuple(slice(None) if any_ else place for any_, place in zip(free, coordinate, strict=True))]
    found = sorted(int(rank) for rank in alike.flatten())
    if set(group) <= {own} or set(group) <= set(found):
        return tuple(found)
    return _across(mesh._get_root_mesh().mesh, own, found, group)


def _across(root: torch.Tensor, own: int, found: Sequence[int], group: tuple[int, ...]) -> tuple[int, ...]:
    """All ranks that are reached by a step in the one and a step in the other. Both are dimensions of the root mesh
    where there is one; else ranks that are laid out regularly."""
    places = {rank: _place(root, rank) for rank in {own, *found, *group}}
    if any(place is None for place in places.values()):
        return tuple(sorted({one + other - own for one in found for other in group}))
    here = places[own]
    assert here is not None
    fixed = [len({place[dim] for place in places.values() if place}) == 1 for dim in range(root.dim())]
    alike = root[tuple(place if same else slice(None) for same, place in zip(fixed, here, strict=True))]
    return tuple(sorted(int(rank) for rank in alike.flatten()))


def _place(mesh: torch.Tensor, rank: int) -> tuple[int, ...] | None:
    """The coordinate of a rank; ``None`` where it is not on the mesh."""
    found = torch.nonzero(mesh == rank)
    return tuple(int(place) for place in found[0]) if len(found) == 1 else None
