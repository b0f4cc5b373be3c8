"""How saved optimizer state gets back to its parameters, and groups to theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.format.names import Key, element, join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.contents import CPU
from ckptd_client.capture.dtensor import local_of
from ckptd_client.capture.parts import Part
from ckptd_client.dtypes import dtype_name, torch_dtype

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

Entry = dict[Any, object]
Group = dict[str, Any]
Build = Callable[[], object]


class OptimizerRestore:
    """One optimizer in one restore."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, path: Path, keys: list[list[Key]], restoring: Restoring
    ) -> None:
        self._optimizer = optimizer
        self._path = path
        self._keys = keys
        self._restoring = restoring

    def prepare(self, saved: object) -> None:
        """Check and plan. Notes names that are on one side only, groups that are cut otherwise, shapes that differ."""
        members = cast("dict[str, Any]", saved) if isinstance(saved, dict) else {}
        state, groups = members.get("state"), members.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list):
            self._restoring.mismatch(join(self._path), "the checkpoint has no optimizer of this kind here")
            return
        found = cast("list[Group]", groups)
        of_group = cast("dict[Key, int]", members.get("members") or {})
        live = [key for keys in self._keys for key in keys]
        common = set(
            self._restoring.common(cast("list[Any]", live), cast("dict[Any, object]", of_group), (*self._path, "state"))
        )
        for number, (group, keys) in enumerate(zip(self._optimizer.param_groups, self._keys, strict=True)):
            self._prepare_group(number, group, [key for key in keys if key in common], of_group, found)
            for parameter, key in zip(group["params"], keys, strict=True):
                if key in common:
                    entry = cast("dict[Key, Entry]", state).get(key)
                    self._prepare_entry(parameter, entry, (*self._path, "state", segment(key)), group)
        self._prepare_others(members.get("others") or {})

    def _prepare_group(
        self, number: int, group: Group, keys: list[Key], of_group: dict[Key, int], saved: list[Group]
    ) -> None:
        where = join((*self._path, "param_groups", element(number)))
        if not self._restoring.selection.takes(where):
            return
        ours = {key for group_keys in self._keys for key in group_keys if self._takes(key)}
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
        return self._restoring.selection.takes(join((*self._path, "state", segment(key))))

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
            if self._restoring.selection.takes(name):
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
