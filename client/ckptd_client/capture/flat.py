"""Flat buffers that hold parts of many tensors, one behind the other, as ZeRO-like engines and FSDP keep them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.errors import StateError
from ckptd.format.dtypes import element_count
from ckptd.format.names import join, segment
from ckptd.format.records import Span
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.holdings import Flat, Known
from ckptd_client.capture.walk import Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """Where a flat buffer holds a range of one tensor's elements."""

    name: str
    """Of the tensor; unique in the buffer, and the same on all ranks."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """The first of its elements, in row-major order, that is in the buffer."""
    stop: int
    """Behind the last. Equal to ``start``: this rank holds nothing of the tensor, and knows of it."""
    at: int
    """Where in the buffer the range begins, in elements."""

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def elsewhere(self) -> bool:
        """Whether the tensor has elements, and this rank none of them."""
        return self.start == self.stop and 0 not in self.shape

    @property
    def flat(self) -> Flat:
        return Flat(tuple(self.shape), Span(self.start, self.stop))


class FlatPartition:
    """A flat buffer of this rank that holds ranges of many tensors: what an engine of the ZeRO kind has of parameters,
    master weights or optimizer state. It may stand anywhere in the state, and is saved as a dict of its tensors, each
    under its own name and shape and as the range that this rank has; what is in no slice, such as padding, is not
    saved. All ranks' slices together hold each element once.

    Where the buffer is a parameter of an optimizer in the state, the optimizer's state of it is taken apart likewise.
    """

    def __init__(self, buffer: torch.Tensor, slices: Iterable[FlatSlice]) -> None:
        """Raises :class:`StateError` for slices that do not lie in their tensor or in the buffer, or that overlap in
        it, and for a name given twice."""
        self.buffer = buffer
        self.slices = tuple(slices)
        _check(buffer, self.slices)


def _check(buffer: torch.Tensor, slices: Sequence[FlatSlice]) -> None:
    if buffer.dim() != 1:
        raise StateError(f"a flat buffer has one dimension, not {buffer.dim()}", hint="pass buffer.view(-1)")
    names = {one.name for one in slices}
    if len(names) < len(slices):
        raise StateError("two slices of a flat buffer have the same name")
    end = 0
    for one in sorted(slices, key=lambda one: (one.at, one.elements)):
        if not 0 <= one.start <= one.stop <= element_count(tuple(one.shape)):
            raise StateError(f"{one.name}: elements {one.start} to {one.stop} of a tensor of shape {one.shape}")
        if not one.elements:
            continue
        if one.at < end or one.at + one.elements > buffer.numel():
            raise StateError(
                f"{one.name}: places {one.at} to {one.at + one.elements} overlap with another slice, or are not in the "
                f"buffer of {buffer.numel()} elements"
            )
        end = one.at + one.elements


class FlatViews:
    """Views of the slices of a buffer; the same objects as long as the buffer lies where it lay."""

    def __init__(self) -> None:
        self._made_of: tuple[int, int, int, torch.dtype] | None = None
        self._slices: Sequence[FlatSlice] = ()
        self._views: list[torch.Tensor] = []
        self.version = 0
        """Grows whenever the views are made anew."""

    def of(self, buffer: torch.Tensor, slices: Sequence[FlatSlice]) -> list[torch.Tensor]:
        """One for each slice, in order."""
        lies = (id(buffer), buffer.data_ptr(), buffer.numel(), buffer.dtype)
        if lies != self._made_of or slices is not self._slices:
            flat = buffer.detach()
            self._views = [flat.narrow(0, one.at if one.elements else 0, one.elements) for one in slices]
            self._made_of, self._slices = lies, slices
            self.version += 1
        return self._views


class FlatSource(Source):
    """A :class:`FlatPartition` somewhere in the state."""

    def __init__(self, partition: FlatPartition, path: Path) -> None:
        self.partition = partition
        self._path = path
        self._names = [join((*path, segment(one.name))) for one in partition.slices]
        self._views = FlatViews()
        self._tree = {
            "$": "dict",
            "v": [
                [one.name, {"$": "tensor", "v": name}] for one, name in zip(partition.slices, self._names, strict=True)
            ],
        }

    @property
    def version(self) -> int:
        """Grows whenever the buffer has moved."""
        self.views()
        return self._views.version

    def views(self) -> list[torch.Tensor]:
        """What this rank holds of each tensor, flat."""
        return self._views.of(self.partition.buffer, self.partition.slices)

    def known(self) -> dict[int, Known]:
        """What is known of each view, by its id."""
        return {id(view): Known(flat=one.flat) for one, view in zip(self.partition.slices, self.views(), strict=True)}

    def walk(self, walk: Walk) -> Any:
        fenced = id(self.partition.buffer) in walk.owned
        walk.extend(self._names, self.views(), [fenced] * len(self._names))
        return self._tree

    def prepare(self, saved: object, restoring: Restoring) -> None:
        if not isinstance(saved, dict):
            restoring.mismatch(join(self._path), "the checkpoint has no tensors here")
            return
        names = [one.name for one in self.partition.slices]
        found = cast("dict[str, object]", saved)
        full_names = dict(zip(names, self._names, strict=True))
        for name in restoring.common(names, found, self._path):
            full, value = full_names[name], found[name]
            if isinstance(value, SavedTensor):
                restoring.copy(full, value)
            else:
                restoring.mismatch(full, "a tensor here, and the checkpoint has none")
