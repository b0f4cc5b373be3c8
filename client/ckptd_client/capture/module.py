"""Modules: every parameter and persistent buffer, under names that do not depend on what wraps the model.

A module is walked directly, as ``state_dict()`` would, without making that dict for each save. A module that has a way
of its own to make or take its state dict (an override, a hook) is asked for it instead.
"""

# torch keeps what is walked here to itself, and leaves the types of hooks open
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ckptd.errors import StateError, first_line
from ckptd.format.names import join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.flat import FlatSlice
from ckptd_client.capture.fsdp import FlatParameter, buffer_dtypes, flat_parameter, is_fsdp
from ckptd_client.capture.holdings import Known
from ckptd_client.capture.replication import replicated
from ckptd_client.capture.template import Template
from ckptd_client.capture.walk import Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Children under which FSDP, torch.compile and activation checkpointing keep the module that they wrap."""
_EXTRA = "_extra_state"
_FLAT = "_flat_param"
"""What FSDP calls a flat parameter in its module."""


class ModuleSource(Source):
    """A module somewhere in the state."""

    def __init__(self, module: nn.Module, path: Path) -> None:
        self.module = module
        self._path = path
        self._shape: list[object] = []  # modules and names in the order of the walk: what the names depend on
        self._own_way = False
        self._names: list[str] = []  # canonical, of each tensor of the walk
        self._extras: list[tuple[str, nn.Module]] = []
        self._flats: list[FlatParameter] = []
        self._flat_names: dict[int, list[str]] = {}  # by id of a flat parameter, what each of its slices is called
        self._pieces: Pieces = {}
        self._template = Template(path)
        self.tensors: list[torch.Tensor] = []
        self.version = 0
        """Grows whenever a tensor has come to stand under another name."""

    # What there is

    def refresh(self) -> None:
        """Look at the module anew. Asks no other rank."""
        shape, tensors = self._look()
        same = shape == self._shape
        if not same:
            self._flats = _flat_parameters(self.module)
            self._pieces = _by_module(self._flats)
            shape, tensors = self._look()
            self._shape = shape
            self._own_way = any(_has_own_way(module) for module in self.module.modules())
            self._name_all()
        if not same or any(a is not b for a, b in zip(tensors, self.tensors, strict=True)):
            self.tensors = tensors
            self.version += 1

    def _look(self) -> tuple[list[object], list[torch.Tensor]]:
        shape: list[object] = []
        tensors: list[torch.Tensor] = []
        _visit(self.module, shape, tensors, self._pieces)
        return shape, tensors

    def _name_all(self) -> None:
        found = list(_named(self.module, "", self._pieces))
        self._names = [name for name, _ in found if not isinstance(_, nn.Module)]
        self._extras = [(name, owner) for name, owner in found if isinstance(owner, nn.Module)]
        everything = [name for name, _ in found]
        if len(set(everything)) < len(everything):
            twice = next(name for name in everything if everything.count(name) > 1)
            raise StateError(f"{join(self._path)}: two values are called {twice} without the names of wrappers")
        named = {(id(slot[0]), slot[1]): name for name, slot in found if isinstance(slot, tuple)}
        self._flat_names = {
            id(flat.parameter): [named[id(module._parameters), key] for module, key in flat.places]
            for flat in self._flats
        }

    def parameter_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Canonical names within the module; a tied parameter has several."""
        for name, tensor in zip(self._names, self.tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                yield name, tensor
        for flat in self._flats:
            yield from zip(self._flat_names[id(flat.parameter)], flat.originals, strict=False)

    def flat_parameters(self) -> Iterator[tuple[nn.Parameter, tuple[tuple[str, FlatSlice], ...]]]:
        """Flat parameters, and the canonical name and place of each original one in it; and original ones of which this
        rank has no element."""
        for flat in self._flats:
            named = tuple(zip(self._flat_names[id(flat.parameter)], flat.slices, strict=True))
            yield flat.parameter, named
            for original, one in zip(flat.originals, named, strict=False):
                if one[1].elsewhere:
                    yield original, (one,)

    def known(self) -> dict[int, Known]:
        """What the module says of its tensors and parameters, by their ids."""
        kept = set(map(id, self.tensors))  # others may go, and leave their id to whatever comes
        found = {place: known for place, known in replicated(self.module).items() if place in kept}
        for flat in self._flats:
            knowns = [Known(flat.group, flat=one.flat) for one in flat.slices]
            found |= zip(map(id, flat.pieces()), knowns, strict=True)
            found |= zip(map(id, flat.originals), knowns, strict=False)
        return found

    def owned_pieces(self, owned: set[int]) -> Iterator[int]:
        """The id of each piece of a flat parameter whose parameter, flat or original, is among ``owned``."""
        for flat in self._flats:
            whole = id(flat.parameter) in owned
            for i, piece in enumerate(flat.pieces()):
                if whole or (flat.originals and id(flat.originals[i]) in owned):
                    yield id(piece)

    def walk(self, walk: Walk) -> Any:
        try:
            state = self._state_dict() if self._own_way else self._walked()
        except Exception as error:
            raise StateError(f"{join(self._path)}: the module's state cannot be had: {first_line(error)}") from error
        return self._template.walk(walk, state)

    def _walked(self) -> dict[str, object]:
        state: dict[str, object] = dict(zip(self._names, self.tensors, strict=True))
        for name, owner in self._extras:
            state[name] = owner.get_extra_state()
        return state

    def _state_dict(self) -> dict[str, Any]:
        """The module's own state dict, under canonical names."""
        canonical = _canonical_names(self.module)
        state: dict[str, Any] = {}
        for name, value in self.module.state_dict().items():
            state[canonical(name)] = value
        return state

    # Restore

    def prepare(self, saved: object, restoring: Restoring) -> None:
        self.refresh()
        where = join(self._path)
        if not isinstance(saved, dict):
            restoring.mismatch(where, "the checkpoint has no module here")
            return
        found = cast("dict[str, object]", saved)
        if self._own_way:
            self._prepare_own_way(found, restoring)
            return
        live = dict(zip(self._names, self.tensors, strict=True))
        extras = dict(self._extras)
        slots = {name: slot for name, slot in _named(self.module, "", self._pieces) if not isinstance(slot, nn.Module)}
        dtypes = buffer_dtypes(self.module)
        for name in restoring.common([*live, *extras], found, self._path):
            value, full = found[name], join((*self._path, segment(name)))
            if name in extras:
                restoring.load(full, value, extras[name].get_extra_state, extras[name].set_extra_state)
            elif isinstance(value, SavedTensor):
                owner, key = slots[name]
                if not restoring.copy(full, value, dtypes.get(id(live[name]), ())):
                    restoring.make(full, value, functools.partial(owner.__setitem__, key), live[name].device)
            else:
                restoring.mismatch(full, "a tensor here, and the checkpoint has none")

    def _prepare_own_way(self, found: dict[str, object], restoring: Restoring) -> None:
        canonical = _canonical_names(self.module)
        live = {canonical(name): (name, value) for name, value in self.module.state_dict().items()}
        wanted: dict[str, object] = {}
        for name in restoring.common(live, found, self._path):
            own_name, value = live[name]
            full = join((*self._path, segment(name)))
            saved = found[name]
            if isinstance(value, torch.Tensor) != isinstance(saved, SavedTensor):
                restoring.mismatch(full, "a tensor on one side only")
            elif not isinstance(saved, SavedTensor) or restoring.fits(full, saved):
                wanted[own_name] = saved
        strict = len(wanted) == len(live)
        restoring.load(
            join(self._path),
            wanted,
            self.module.state_dict,
            lambda state: self.module.load_state_dict(state, strict=strict),
        )


Slot = tuple[dict[str, Any], str]
"""Where a tensor stands in its module: the dict of parameters or buffers, and the key."""


Pieces = dict[int, list[tuple[str, FlatParameter, int]]]
"""By the id of a module: its parameters that are kept in flat ones, by key, and the number of the slice."""


def _flat_parameters(module: nn.Module) -> list[FlatParameter]:
    found = (flat_parameter(inner) for inner in module.modules() if is_fsdp(inner))
    return [flat for flat in found if flat is not None]


def _by_module(flats: list[FlatParameter]) -> Pieces:
    pieces: Pieces = {}
    for flat in flats:
        for (module, key), number in [*zip(flat.places, range(len(flat.places)), strict=True), *flat.shared]:
            pieces.setdefault(id(module), []).append((key, flat, number))
    return pieces


def _visit(module: nn.Module, shape: list[object], tensors: list[torch.Tensor], pieces: Pieces) -> None:
    """Collect tensors in the order of ``state_dict()``, and what their names depend on. Fast: runs at every save."""
    if module._state_dict_pre_hooks or module._state_dict_hooks or module._load_state_dict_pre_hooks:
        shape += (*module._state_dict_pre_hooks, *module._state_dict_hooks, *module._load_state_dict_pre_hooks)
        for hook in module._state_dict_pre_hooks.values():
            if not _foreign(hook) and not is_fsdp(module):  # whose hook would gather
                hook(module, "", False)  # FSDP2 brings its parameters into their sharded form
    shape.append(module)
    flat = pieces.get(id(module), ()) if pieces else ()
    for key, of, number in flat:
        shape.append(key)
        tensors.append(of.pieces()[number])
    for key, parameter in module._parameters.items():
        if parameter is not None and not (pieces and _is_flat(key, flat)):
            shape.append(key)
            tensors.append(parameter)
    if module._buffers:
        passing = module._non_persistent_buffers_set
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in passing:
                shape.append(key)
                tensors.append(buffer)
    for key, child in module._modules.items():
        if child is not None:
            shape.append(key)
            _visit(child, shape, tensors, pieces)


def _named(module: nn.Module, prefix: str, pieces: Pieces) -> Iterator[tuple[str, Slot | nn.Module]]:
    """Canonical names in the order of :func:`_visit`: of each tensor its slot, of each extra state its module."""
    flat = pieces.get(id(module), ())
    for key, _, _ in flat:
        yield prefix + key, (module._parameters, key)
    for key, parameter in module._parameters.items():
        if parameter is not None and not _is_flat(key, flat):
            yield prefix + key, (module._parameters, key)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield prefix + key, (module._buffers, key)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield prefix + _EXTRA, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _named(child, prefix if _wraps(module, key) else f"{prefix}{key}.", pieces)


def _is_flat(key: str, flat: Sequence[tuple[str, FlatParameter, int]]) -> bool:
    """Whether a parameter is a flat one, or kept in one."""
    return key == _FLAT or any(key == kept for kept, _, _ in flat)


def _wraps(module: nn.Module, key: str) -> bool:
    """Whether the child is what ``module`` merely wraps, so that its name is not part of the tensor's."""
    distributed = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return key in _WRAPPERS or (key == "module" and distributed)


def _canonical_names(module: nn.Module) -> Callable[[str], str]:
    """What turns the names of the module's own state dict into canonical ones."""
    wrapped = {
        f"{prefix}{'.' if prefix else ''}{key}"
        for prefix, child in module.named_modules(remove_duplicate=False)
        for key in child._modules
        if _wraps(child, key)
    }

    def canonical(name: str) -> str:
        kept: list[str] = []
        parts = name.split(".")
        for i, part in enumerate(parts):
            if ".".join(parts[: i + 1]) not in wrapped:
                kept.append(part)
        return ".".join(kept)

    return canonical


@functools.cache
def _class_has_own_way(kind: Hashable) -> bool:
    """Whether the class makes or takes its state dict otherwise than :class:`torch.nn.Module` does.

    Torch's own layers override loading only, to read older versions of themselves: nothing that a checkpoint has.
    """
    own: dict[str, Any] = {
        name: getattr(kind, name)
        for name in ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
    }
    return any(
        method is not getattr(nn.Module, name)
        and not (name == "_load_from_state_dict" and str(method.__module__).startswith("torch.nn."))
        for name, method in own.items()
    )


def _has_own_way(module: nn.Module) -> bool:
    hooks = (
        *module._state_dict_pre_hooks.values(),
        *module._state_dict_hooks.values(),
        *module._load_state_dict_pre_hooks.values(),
    )
    return _class_has_own_way(cast(Hashable, type(module))) or any(_foreign(hook) for hook in hooks)


def _foreign(hook: Any) -> bool:
    """Whether a hook is not torch's own. Those take off names of wrappers, or convert older versions."""
    function = getattr(hook, "func", hook)
    return not str(getattr(function, "__module__", "")).startswith("torch.")
