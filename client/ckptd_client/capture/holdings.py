"""What is known of tensors beyond what they say themselves: which part of a name they are, and who holds the same.

A DTensor says what it is. A plain tensor is a replica only where that is known: as a parameter or buffer under data
parallelism, as an optimizer's state of such a parameter, or because the caller has declared it. All else is the rank's
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace

from ckptd.format.records import Span
from ckptd_client.capture.dtensor import Meshes, distributed_part, local_of, spec_of
from ckptd_client.capture.parts import Part, bare, holds_nothing

Declared = Literal[True] | tuple[str, ...]
"""Which plain tensors are equal on all ranks: all, or those whose names match a pattern."""


class Flat(msgspec.Struct, frozen=True):
    """A tensor is a flat range of another one's elements."""

    shape: tuple[int, ...]
    """Of the other."""
    span: Span


class Known(msgspec.Struct, frozen=True):
    """What stands around a tensor, or a parameter, says of it."""

    group: tuple[int, ...] = ()
    """Ranks on which it is kept equal, ascending."""
    led: bool = False
    """Equal again at the next forward only, when the first rank's value goes to all."""
    flat: Flat | None = None


class Parameter(msgspec.Struct, frozen=True):
    """A parameter, as far as its optimizer's state depends on it."""

    part: Part
    everyone: tuple[int, ...]
    """All ranks that have state of it; ``()`` where that is not known."""
    partitioned: bool = False
    """Only one rank has state of it, whoever has the parameter itself."""
    apart: bool = False
    """It is one of several in a flat one, and what these have in common is saved with each."""

    @property
    def everywhere(self) -> bool:
        """Whether each rank that has the parameter has state of it."""
        return self.part.whole and not self.partitioned


@dataclass
class Holdings:
    """Of one structure of the state."""

    world: int = 1
    declared: Declared = ()
    known: Mapping[int, Known] = field(default_factory=dict[int, Known])
    """By the ``id`` of a tensor of a module, or of a parameter."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    """By the name under which an optimizer's state of it stands."""
    meshes: Meshes = field(default_factory=Meshes)

    def part(self, name: str, tensor: torch.Tensor) -> Part:
        """What this rank holds. Raises :class:`ckptd.errors.StateError` for a DTensor that is not a value."""
        known = self.known.get(id(tensor))
        spec = spec_of(tensor)
        if spec is not None:
            return distributed_part(name, spec, local_of(tensor), self.meshes, known.group if known else ())
        if known is not None:
            return _plain(tensor, known)
        parameter = self._parameter_of(name)
        part = _plain(tensor, Known()) if parameter is None else _state_part(tensor, parameter)
        if part.replicas or not part.whole or (parameter is not None and not parameter.everywhere):
            return part
        declared = self._declared_ranks(name)
        return replace(part, replicas=declared) if declared else part

    def parameter(self, name: str, tensor: torch.Tensor, flat: Flat | None = None) -> Parameter:
        """A parameter, whether or not it has state yet; or one of several in a flat one, the range ``flat`` of it."""
        known = self.known.get(id(tensor), Known())
        if flat is not None:
            return Parameter(_plain(tensor, Known(known.group, flat=flat)), (), apart=True)
        part = self.part(name, tensor)
        spec = spec_of(tensor)
        if spec is not None:
            return Parameter(part, self.meshes.everyone(spec.mesh, known.group))
        return Parameter(part, () if known.flat is not None else part.replicas)

    def may_be_tied(self, name: str) -> bool:
        """Whether a tensor is stored once with others of the same memory."""
        parameter = self._parameter_of(name)
        return parameter is None or not parameter.apart

    def _parameter_of(self, name: str) -> Parameter | None:
        if not self.parameters:
            return None
        while "/" in name:
            name = name.rpartition("/")[0]
            if name in self.parameters:
                return self.parameters[name]
        return None

    def _declared_ranks(self, name: str) -> tuple[int, ...]:
        if self.world > 1 and (self.declared is True or any(fnmatchcase(name, pattern) for pattern in self.declared)):
            return tuple(range(self.world))
        return ()


def _plain(tensor: torch.Tensor, known: Known) -> Part:
    local = bare(tensor)
    if known.flat is None:
        return Part(local, tuple(tensor.shape), None, None, known.group, led=known.led)
    flat = known.flat
    if flat.span.start == flat.span.stop:
        return holds_nothing(local, flat.shape)
    return Part(local, flat.shape, None, flat.span, known.group)


def _state_part(tensor: torch.Tensor, parameter: Parameter) -> Part:
    """What a plain tensor of a parameter's state is: the same part, where it is shaped like it; common to all that have
    the parameter, where it is a mere number."""
    of, local = parameter.part, bare(tensor)
    shape = tuple(tensor.shape)
    if parameter.partitioned:
        return Part(local, shape, None, None, ())
    if of.whole:
        return Part(local, shape, None, None, of.replicas)
    if not tensor.dim():
        return Part(local, shape, None, None, parameter.everyone)
    if of.span is not None and tensor.is_contiguous() and tensor.numel() == of.span.stop - of.span.start:
        return replace(of, local=local.view(-1)) if tensor.numel() else holds_nothing(local, of.shape)
    if of.span is not None or of.more or shape != tuple(of.local.shape):
        return Part(local, shape, None, None, ())
    return replace(of, local=local) if tensor.numel() else holds_nothing(local, of.shape)
