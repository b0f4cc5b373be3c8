"""The tensors of the state, from one capture to the next.

What was found out about a tensor (its memory, its ties to others) stands as long as the tensor lies where it lay. So a
capture of a state that did not move costs one comparison a tensor, and of one that did, work for what moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.errors import StateError
from ckptd.format.records import Box, Span
from ckptd.limits import NAME_BYTES_MAX, TENSOR_DIMS_MAX
from ckptd_client.capture.dtensor import is_distributed, local_of, part_of
from ckptd_client.dtypes import dtype_name


@dataclass(slots=True)
class Leaf:
    """One tensor of the state that is to be copied."""

    name: str
    """Canonical and unique; see :mod:`ckptd.format.names`."""
    tensor: torch.Tensor
    """What this rank holds of it, live and detached, as it is: it may be strided, expanded, or on a device."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box | None
    span: Span | None
    """Which part of the global tensor ``tensor`` is; neither: all of it."""
    per_rank: bool
    """The value is this rank's own and says nothing about other ranks' values of the same name."""
    fenced: bool
    """A parameter that an optimizer owns, or its state: expected to change inside ``optimizer.step()`` only."""


class Structure:
    """Stands for names, shapes, dtypes, parts, ties and order: the same object as long as all of these are the same."""

    __slots__ = ("description",)

    def __init__(self, description: list[object]) -> None:
        self.description = description


Memory = tuple[object, ...]
"""Tensors of equal memory are the same value, whatever they are called."""


class Leaves:
    """The leaves and aliases of the last capture, and what it takes to see that they still hold."""

    def __init__(self, *, per_rank: bool) -> None:
        self._per_rank = per_rank
        self.forget()

    def forget(self) -> None:
        """Let go of all tensors."""
        self.leaves: list[Leaf] = []
        """The same list object as long as no leaf moved. Never changed in place: an older capture may still hold it."""
        self.aliases: dict[str, str] = {}
        self.notices: tuple[str, ...] = ()
        self.structure = Structure([])
        self._names: list[str] = []
        self._fenced: list[bool] = []
        self._known: list[torch.Tensor] = []  # by position: the local tensor, detached
        self._distributed = False
        self._leaf_at: list[int] = []  # by position: index of the leaf
        self._owner: dict[Memory, int] = {}  # position of the first tensor with this memory
        self._tied: set[int] = set()  # positions that share their memory with another

    def update(self, names: list[str], tensors: list[torch.Tensor], fenced: list[bool]) -> None:
        """Take in what a walk found, in order. Raises :class:`StateError` for a tensor that cannot be saved."""
        if names == self._names and fenced == self._fenced:
            moved = self._moved(tensors)
            if moved is not None and (not moved or self._replace(tensors, moved)):
                return
        self._build(names, tensors, fenced)

    def _moved(self, tensors: list[torch.Tensor]) -> list[int] | None:
        """Positions whose memory is not what it was; ``None`` where tensors cannot even be compared."""
        held = [local_of(tensor) for tensor in tensors] if self._distributed else tensors
        try:
            return [
                i
                for i, (tensor, known) in enumerate(zip(held, self._known, strict=True))
                if not tensor.is_set_to(known) or tensor.dtype is not known.dtype
            ]
        except RuntimeError:  # another kind of tensor in the same place: meta, sparse, another device
            return None

    def _replace(self, tensors: list[torch.Tensor], moved: list[int]) -> bool:
        """New leaves for the positions that moved. False where that would change the structure."""
        leaves = list(self.leaves)
        for i in moved:
            old = leaves[self._leaf_at[i]]
            new = self._leaf(self._names[i], tensors[i], self._fenced[i])
            before, after = _memory(old), _memory(new)
            if i in self._tied or _describe(new) != _describe(old) or (after is not None and after in self._owner):
                return False
            if before is not None:
                self._owner.pop(before, None)
            if after is not None:
                self._owner[after] = i
            leaves[self._leaf_at[i]] = new
            self._known[i] = local_of(tensors[i]).detach()
        self.leaves = leaves
        return True

    def _build(self, names: list[str], tensors: list[torch.Tensor], fenced: list[bool]) -> None:
        last = self.structure
        self.forget()
        self._distributed = any(map(is_distributed, tensors))
        seen: set[str] = set()
        for i, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            if name in seen:
                raise StateError(f"{name}: two tensors of the state have this name")
            seen.add(name)
            self._add(i, self._leaf(name, tensor, fenced[i]))
            self._known.append(local_of(tensor).detach())
        self.notices = tuple(
            f"{name}: a parameter without elements"
            for name, tensor in zip(names, tensors, strict=True)
            if isinstance(tensor, torch.nn.Parameter) and not tensor.numel()
        )
        self._names, self._fenced = names, fenced
        description: list[object] = [*map(_describe, self.leaves), self.aliases]
        self.structure = last if last.description == description else Structure(description)

    def _add(self, i: int, leaf: Leaf) -> None:
        memory = _memory(leaf)
        first = self._owner.setdefault(memory, i) if memory is not None else i
        if first == i:
            self._leaf_at.append(len(self.leaves))
            self.leaves.append(leaf)
            return
        owner = self.leaves[self._leaf_at[first]]
        owner.fenced = owner.fenced or leaf.fenced
        self.aliases[leaf.name] = owner.name
        self._leaf_at.append(self._leaf_at[first])
        self._tied |= {first, i}

    def _leaf(self, name: str, tensor: torch.Tensor, fenced: bool) -> Leaf:
        _refuse_unsavable(name, tensor)
        local, box, span = part_of(name, tensor)
        if local is not tensor:
            _refuse_unsavable(name, local)
        local = local.detach()
        if type(local) is not torch.Tensor:
            local = local.as_subclass(torch.Tensor)
        whole = box is None and span is None
        return Leaf(name, local, tuple(tensor.shape), box, span, self._per_rank and whole, fenced)


def _describe(leaf: Leaf) -> object:
    return leaf.name, leaf.shape, leaf.tensor.dtype, leaf.box, leaf.span, leaf.fenced


def _memory(leaf: Leaf) -> Memory | None:
    """Nothing for an empty tensor: empty tensors share no memory, wherever they point."""
    tensor = leaf.tensor
    if not tensor.numel():
        return None
    part = (leaf.shape, leaf.box, leaf.span)
    bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), bits, part


def _refuse_unsavable(name: str, tensor: torch.Tensor) -> None:
    if len(name.encode()) > NAME_BYTES_MAX:
        raise StateError(f"{name[:80]}…: a name of more than {NAME_BYTES_MAX} bytes")
    if is_lazy(tensor):
        raise StateError(f"{name}: a parameter that is not initialized yet", hint="run the lazy module once first")
    if tensor.is_meta:
        raise StateError(f"{name}: a tensor on the meta device has no values", hint="materialize the model first")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise StateError(f"{name}: a {kind} tensor cannot be saved", hint="keep its plain parts in the state instead")
    try:
        dtype_name(tensor.dtype)
    except StateError as error:
        raise StateError(f"{name}: {error.message}", hint=error.hint) from None
    if tensor.dim() > TENSOR_DIMS_MAX:
        raise StateError(f"{name}: more than {TENSOR_DIMS_MAX} dimensions")
    if is_distributed(tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StateError(f"{name}: a {kind} hides its values in other tensors", hint="keep those in the state instead")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise StateError(f"{name}: its memory has been freed", hint="gather the parameter before saving")
