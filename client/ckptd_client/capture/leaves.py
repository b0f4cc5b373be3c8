"""The tensors of the state, from one capture to the next.

What was found out about a tensor (its memory, its ties to others) stands as long as the tensor lies where it lay. So a
capture of a state that did not move costs one comparison a tensor, and of one that did, work for what moved.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptd.errors import StateError
from ckptd.format.records import Box, Span
from ckptd.limits import NAME_BYTES_MAX, TENSOR_DIMS_MAX
from ckptd_client.capture.dtensor import is_distributed, local_of
from ckptd_client.capture.holdings import Holdings
from ckptd_client.capture.parts import Part
from ckptd_client.capture.shares import Placement, Share, share_out
from ckptd_client.dtypes import dtype_name


@dataclass(slots=True)
class Leaf:
    """One piece of a tensor of the state, that is to be copied; or a tensor that this rank has only seen."""

    name: str
    """Of the tensor, canonical; see :mod:`ckptd.format.names`. Several pieces of one tensor follow each other."""
    tensor: torch.Tensor
    """The piece, live and detached, as it is: it may be strided, expanded, or on a device."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box | None
    span: Span | None
    """Which part of the global tensor ``tensor`` is; neither: all of it."""
    per_rank: bool
    """The value is this rank's own and says nothing about other ranks' values of the same name."""
    fenced: bool
    """A parameter that an optimizer owns, or its state: expected to change inside ``optimizer.step()`` only."""
    resident: bool = False
    """Kept in this node's memory only: another rank's shard has it."""


class Structure:
    """Stands for names, shapes, dtypes, parts, ties and order: the same object as long as all of these are the same."""

    __slots__ = ("description",)

    def __init__(self, description: list[object]) -> None:
        self.description = description


class Parts(Mapping[str, Part]):
    """What this rank holds of each tensor, by name. Made when first asked."""

    def __init__(self, names: list[str], held: list[Part]) -> None:
        self._names = names
        self._held = held

    @functools.cached_property
    def _by_name(self) -> dict[str, Part]:
        return dict(zip(self._names, self._held, strict=True))

    def __getitem__(self, name: str) -> Part:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
Memory = tuple[object, ...]
"""Tensors of equal memory are the same value, whatever they are called."""


class Leaves:
    """The leaves and aliases of the last capture, and what it takes to see that they still hold."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.forget()

    def forget(self) -> None:
        """Let go of all tensors."""
        self.leaves: list[Leaf] = []
        """The same list object as long as no leaf moved. Never changed in place: an older capture may still hold it."""
        self.aliases: dict[str, str] = {}
        self.notices: tuple[str, ...] = ()
        self.structure = Structure([])
        self.parts = Parts([], [])
        self._context: object = None
        self._holdings = Holdings()
        self._names: list[str] = []
        self._fenced: list[bool] = []
        self._known: list[torch.Tensor] = []  # by position: the local tensor, detached
        self._held: list[Part] = []  # by position
        self._distributed = False
        self._first: list[int] = []  # by position: the first one with the same memory
        self._leaves_at: dict[int, list[tuple[int, Share]]] = {}  # by first position: numbers of leaves, and which cut
        self._owner: dict[Memory, int] = {}  # position of the first tensor with this memory
        self._tied: set[int] = set()  # positions that share their memory with another

    def update(
        self,
        names: list[str],
        tensors: list[torch.Tensor],
        fenced: list[bool],
        context: object,
        holdings: Callable[[], Holdings],
    ) -> None:
        """Take in what a walk found, in order. ``holdings`` is asked for anew when ``context`` is not what it was.

        Raises :class:`StateError` for a tensor that cannot be saved.
        """
        if names == self._names and fenced == self._fenced and context == self._context:
            moved = self._moved(tensors)
            if moved is not None and (not moved or self._replace(tensors, moved)):
                return
        self._build(names, tensors, fenced, holdings())
        self._context = context

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
        """New leaves for the positions that moved, cut as they were. False where that would change the structure."""
        leaves, held = list(self.leaves), list(self._held)
        for i in moved:
            old, new = held[i], self._part(self._names[i], tensors[i])
            before, after = _memory(old), _memory(new)
            if i in self._tied or new.description != old.description or (after is not None and after in self._owner):
                return False
            if before is not None:
                self._owner.pop(before, None)
            if after is not None:
                self._owner[after] = i
            held[i] = new
            for number, share in self._leaves_at[i]:
                leaves[number] = self._leaf(i, new, share, leaves[number].fenced)
            self._known[i] = local_of(tensors[i]).detach()
        self.leaves, self._held, self.parts = leaves, held, Parts(self._names, held)
        return True

    def _build(self, names: list[str], tensors: list[torch.Tensor], fenced: list[bool], holdings: Holdings) -> None:
        last = self.structure
        self.forget()
        self._holdings = holdings
        self._distributed = any(map(is_distributed, tensors))
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise StateError(f"{twice}: two tensors of the state have this name")
        self._names, self._fenced = names, fenced
        self._held = [self._part(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        self._known = [local_of(tensor).detach() for tensor in tensors]
        self.parts = Parts(names, self._held)
        self._tie(tensors)
        self._lay_out()
        self.notices = tuple(
            f"{name}: a parameter without elements"
            for name, tensor in zip(names, tensors, strict=True)
            if isinstance(tensor, torch.nn.Parameter) and not tensor.numel()
        )
        description: list[object] = [*map(_describe, self.leaves), self.aliases]
        self.structure = last if last.description == description else Structure(description)

    def _tie(self, tensors: list[torch.Tensor]) -> None:
        """Find the tensors that are the same memory; where other ranks have all of their elements, the same object."""
        without_memory: dict[int, int] = {}
        for i, (name, part) in enumerate(zip(self._names, self._held, strict=True)):
            memory = _memory(part) if self._holdings.may_be_tied(name) else None
            if memory is not None:
                first = self._owner.setdefault(memory, i)
            else:
                first = without_memory.setdefault(id(tensors[i]), i) if _is_elsewhere(part) else i
            self._first.append(first)
            if first != i:
                self.aliases[name] = self._names[first]
                self._tied |= {first, i}

    def _lay_out(self) -> None:
        """Make the leaves: of each tensor what this rank is to copy."""
        fenced = list(self._fenced)
        for i, first in enumerate(self._first):
            fenced[first] = fenced[first] or self._fenced[i]
        firsts = [i for i, first in enumerate(self._first) if i == first]
        shares = share_out([(self._names[i], self._held[i]) for i in firsts], self.placement)
        for i, of_tensor in zip(firsts, shares, strict=True):
            self._leaves_at[i] = []
            for share in of_tensor:
                self._leaves_at[i].append((len(self.leaves), share))
                self.leaves.append(self._leaf(i, self._held[i], share, fenced[i]))

    def _part(self, name: str, tensor: torch.Tensor) -> Part:
        _refuse_unsavable(name, tensor)
        part = self._holdings.part(name, tensor)
        if part.local.dtype is not tensor.dtype or is_distributed(tensor):
            _refuse_unsavable(name, part.local)
        return part

    def _leaf(self, i: int, part: Part, share: Share, fenced: bool) -> Leaf:
        per_rank = self.placement.world > 1 and part.whole and not part.replicas
        piece = share.of(part)
        return Leaf(
            self._names[i], piece.local, part.shape, piece.box, piece.span, per_rank, fenced, resident=share.resident
        )


def _describe(leaf: Leaf) -> object:
    return leaf.name, leaf.shape, leaf.tensor.dtype, leaf.box, leaf.span, leaf.fenced, leaf.per_rank, leaf.resident


def _memory(part: Part) -> Memory | None:
    """Nothing for an empty tensor: empty tensors share no memory, wherever they point."""
    tensor = part.local
    if not tensor.numel():
        return None
    place = (part.shape, part.box, part.span)
    bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), bits, place


def _is_elsewhere(part: Part) -> bool:
    return not part.local.numel() and 0 not in part.shape


def _refuse_unsavable(name: str, tensor: torch.Tensor) -> None:
    if len(name) > NAME_BYTES_MAX // 4 and len(name.encode()) > NAME_BYTES_MAX:
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
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StateError(f"{name}: a {kind} hides its values in other tensors", hint="keep those in the state instead")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise StateError(f"{name}: its memory has been freed", hint="gather the parameter before saving")
