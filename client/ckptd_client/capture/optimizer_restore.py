"""How saved optimizer state gets back to its parameters, and groups to theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.format.names import Key, element, join, segment
from ckptd.format.records import Span
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.contents import CPU
from ckptd_client.capture.dtensor import local_of
from ckptd_client.capture.flat import FlatSlice
from ckptd_client.capture.optimizer_ties import Live, SavedStates
from ckptd_client.capture.parts import Part
from ckptd_client.capture.walk import ParameterNames
from ckptd_client.dtypes import dtype_name, torch_dtype

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

SET_BY_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""Fields of a group that torch's schedulers add to it."""

Entry = dict[Any, object]
Group = dict[str, Any]
Build = Callable[[], object]


class OptimizerRestore:
    """One optimizer in one restore."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fields: list[Group],
        path: Path,
        keys: list[list[Key]],
        slices: list[tuple[tuple[Key, FlatSlice], ...]],
        names: ParameterNames,
        restoring: Restoring,
    ) -> None:
        """``fields``: the groups whose fields count. ``keys``: by group, what each parameter is called. ``slices``: by
        parameter, of all groups one behind the other, what a flat one consists of. ``names``: of the parameters in
        their modules."""
        self._names = names
        self._optimizer = optimizer
        self._fields = fields
        self._path = path
        self._restoring = restoring
        self._parameters: list[list[tuple[torch.Tensor, Key, tuple[tuple[Key, FlatSlice], ...]]]] = []
        flat = iter(slices)
        for group, of_group in zip(optimizer.param_groups, keys, strict=True):
            parameters = zip(group["params"], of_group, strict=True)
            self._parameters.append([(parameter, key, next(flat)) for parameter, key in parameters])

    def _keys(self, number: int) -> list[Key]:
        """What is in a group: in the place of a flat parameter the ones of which it has elements."""
        found: list[Key] = []
        for _, key, slices in self._parameters[number]:
            found += [name for name, one in slices if not one.elsewhere] if slices else [key]
        return found

    def _live(self) -> Live:
        """The parameters of modules that are not in flat ones."""
        everything = [(parameter, key) for group in self._parameters for parameter, key, slices in group if not slices]
        return {key: (p, *self._names[id(p)]) for p, key in everything if id(p) in self._names}

    def prepare(self, saved: object) -> None:
        """Check and plan. Notes names that are on one side only, groups that are cut otherwise, shapes that differ."""
        members = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
        state, groups = members.get("state"), members.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list):
            self._restoring.mismatch(join(self._path), "the checkpoint has no optimizer of this kind here")
            return
        of_group = cast("dict[Key, int]", members.get("members") or {})
        entries = cast("dict[Key, Entry]", state)
        named = SavedStates(of_group, entries).named_as(self._live(), (*self._path, "state"), self._restoring)
        of_group, entries = named.of_group, named.entries
        live = [key for number in range(len(self._parameters)) for key in self._keys(number)]
        common = set(self._restoring.common(live, of_group, (*self._path, "state")))
        if common and (reason := self._of_another_kind(cast("list[Group]", groups))):
            self._restoring.mismatch(join(self._path), reason)
            return
        for number, group in enumerate(self._optimizer.param_groups):
            found = [key for key in self._keys(number) if key in common]
            self._prepare_group(number, self._fields[number], found, of_group, cast("list[Group]", groups))
            for parameter, key, slices in self._parameters[number]:
                if slices:
                    self._prepare_flat(parameter, [each for each in slices if each[0] in common], entries, group)
                elif key in common:
                    self._prepare_entry(parameter, entries.get(key), (*self._path, "state", segment(key)), group)
        self._prepare_others(members.get("others") or {})

    def _of_another_kind(self, saved: list[Group]) -> str:
        """Why the saved state is another optimizer's; empty where nothing says so. What one is set by tells: either
        side has settings that the other does not know. One side alone may be a newer release of the same. Switches
        do not tell, as they come with releases."""
        ours = {name for name, value in self._optimizer.defaults.items() if not isinstance(value, bool | None)}
        known = {*self._optimizer.defaults, *SET_BY_SCHEDULERS, *(name for group in self._fields for name in group)}
        found = dict.fromkeys(name for group in saved for name in group)
        lacking, foreign = sorted(ours.difference(found)), [name for name in found if name not in known]
        if not (saved and lacking and foreign):
            return ""
        kind = type(self._optimizer).__name__
        return (
            f"it is of another optimizer: the checkpoint's has {', '.join(foreign)}, {kind} has {', '.join(lacking)}; "
            f'exclude=["{join(self._path)}"] starts {kind} afresh'
        )

    def _prepare_group(
        self, number: int, group: Group, keys: list[Key], of_group: dict[Key, int], saved: list[Group]
    ) -> None:
        where = join((*self._path, "param_groups", element(number)))
        if not self._restoring.takes(where):
            return
        everything = range(len(self._parameters))
        ours = {key for each in everything for key in self._keys(each) if self._takes(key)}
        sources = {of_group[key] for key in keys} or ({number} if number < len(saved) else set[int]())
        if len(sources) != 1:
            self._restoring.mismatch(where, f"its parameters are in groups {sorted(sources)} of the checkpoint")
            return
        (source,) = sources
        if keys and set(keys) != {key for key in ours if of_group.get(key) == source}:
            self._restoring.mismatch(where, f"group {source} of the checkpoint has other parameters")
            return
        for field, value in saved[source].items():
            self._prepare_field(group, field, value, f"{where}/{segment(field)}")
        self._restoring.loaded.append(where)

    def _takes(self, key: Key) -> bool:
        return self._restoring.takes(join((*self._path, "state", segment(key))))

    def _prepare_field(self, group: Group, field: str, saved: object, where: str) -> None:
        live = group.get(field)
        if isinstance(live, torch.Tensor) and isinstance(saved, SavedTensor) and where in self._restoring.parts:
            if not self._restoring.copy(where, saved):
                self._restoring.make(where, saved, lambda value: group.__setitem__(field, value), live.device)
        else:
            self._restoring.make(where, saved, lambda value: group.__setitem__(field, value))

    def _prepare_entry(self, parameter: torch.Tensor, saved: Entry | None, path: Path, group: Group) -> None:
        restoring, state = self._restoring, self._optimizer.state
        if saved is None:
            restoring.build(lambda: None, lambda _: state.pop(parameter, None))
            return
        live = cast("Entry", state.get(parameter) or {})
        items: Entry = {}
        for field, value in saved.items():
            name = join((*path, segment(field)))
            if restoring.can_be_had(name, value):
                items[field] = self._value(parameter, live.get(field), value, field, name, group)
            elif field in live:
                items[field] = functools.partial(live.__getitem__, field)
        restoring.build(
            lambda: {field: cast("Build", build)() for field, build in items.items()},
            lambda entry: state.__setitem__(parameter, entry),
        )

    def _prepare_flat(
        self, parameter: torch.Tensor, slices: list[tuple[Key, FlatSlice]], entries: dict[Key, Entry], group: Group
    ) -> None:
        """The state of a flat parameter, put together from that of the ranges in it."""
        state = self._optimizer.state
        found = [(key, one, entries[key]) for key, one in slices if one.elements and key in entries]
        if not found:
            self._restoring.build(lambda: None, lambda _: state.pop(parameter, None))
            return
        live = cast("Entry", state.get(parameter) or {})
        items: dict[Any, Build] = {}
        for field in found[0][2]:
            names = [join((*self._path, "state", segment(key), segment(field))) for key, _, _ in found]
            values = [(one, entry.get(field)) for _, one, entry in found]
            if not all(self._restoring.can_be_had(name, value) for name, (_, value) in zip(names, values, strict=True)):
                continue
            if field != "step" and all(self._is_of(value, one) for one, value in values):
                items[field] = self._flat_value(parameter, live.get(field), names, values)
            else:
                items[field] = self._value(parameter, live.get(field), values[0][1], field, names[0], group)
        self._restoring.build(
            lambda: {field: build() for field, build in items.items()},
            lambda entry: state.__setitem__(parameter, entry),
        )

    def _is_of(self, saved: object, one: FlatSlice) -> bool:
        """Whether a saved value has an element for each element of the tensor that a range is of."""
        return isinstance(saved, SavedTensor) and self._restoring.contents.entry(saved).shape == tuple(one.shape)

    def _flat_value(
        self, parameter: torch.Tensor, live: object, names: list[str], values: list[tuple[FlatSlice, Any]]
    ) -> Build:
        restoring, contents = self._restoring, self._restoring.contents
        if isinstance(live, torch.Tensor) and all(
            name in restoring.parts and dtype_name(live.dtype) == contents.entry(value).dtype
            for name, (_, value) in zip(names, values, strict=True)
        ):
            for name, (_, value) in zip(names, values, strict=True):
                restoring.copy(name, value)
            return lambda: live
        restoring.loaded += names
        dtype = torch_dtype(contents.entry(values[0][1]).dtype)
        wanted = [(one, contents.want(value, Span(one.start, one.stop))) for one, value in values]

        def build() -> torch.Tensor:
            made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # padding stays zero
            for one, each in wanted:
                made.narrow(0, one.at, one.elements).copy_(contents.read(each))
            return made

        return build

    def _value(
        self, parameter: torch.Tensor, live: object, saved: object, field: str, name: str, group: Group
    ) -> Build:
        """What makes one value: the live tensor, to be copied into, or a new one, or whatever else was saved."""
        restoring, contents = self._restoring, self._restoring.contents
        if not isinstance(saved, SavedTensor):
            restoring.loaded.append(name)
            contents.want_all(saved)
            return lambda: contents.value(saved, parameter.device)
        entry = contents.entry(saved)
        known = restoring.parts.get(name) if isinstance(live, torch.Tensor) else None
        if (
            known is not None
            and known.shape == entry.shape
            and dtype_name(known.local.dtype) == entry.dtype
            and restoring.copy(name, saved)
        ):
            return lambda: live
        restoring.loaded.append(name)
        part = restoring.part_of(parameter)
        if field == "step" or entry.shape != part.shape:
            # A counter lies where torch's optimizers want theirs.
            beside = field != "step" or group.get("capturable") or group.get("fused")
            device = parameter.device if beside else CPU
            contents.want(saved)
            return lambda: contents.value(saved, device)
        wanted = [contents.want(saved, piece.box or piece.span) for piece in part.each()]
        return lambda: _like(parameter, part, torch_dtype(entry.dtype), [contents.read(each) for each in wanted])

    def _prepare_others(self, saved: dict[Any, object]) -> None:
        state = cast("dict[Any, object]", self._optimizer.state)
        for key, value in saved.items():
            name = join((*self._path, "others", segment(key)))
            if self._restoring.takes(name):
                self._restoring.make(name, value, functools.partial(state.__setitem__, key))


def _like(parameter: torch.Tensor, part: Part, dtype: torch.dtype, values: list[torch.Tensor]) -> torch.Tensor:
    """The values in a new tensor that lies, and is distributed, as the parameter is."""
    made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    local, own = local_of(made), local_of(parameter)
    if len(values) == 1:
        if local.numel():
            local.copy_(values[0].view(local.shape))
        return made
    whole = torch.empty_strided(own.shape, own.stride(), dtype=dtype)
    for piece, value in zip(part.each(), values, strict=True):
        at = piece.local.storage_offset() - own.storage_offset()
        whole.as_strided(piece.local.shape, piece.local.stride(), at).copy_(value.view(piece.local.shape))
    local.copy_(whole)
    return made
