"""How saved optimizer state gets back to its parameters, and groups to theirs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.format.names import Key, element, join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.contents import CPU
from ckptd_client.capture.dtensor import local_of
from ckptd_client.dtypes import dtype_name, torch_dtype

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

Entry = dict[Any, object]
Group = dict[str, Any]


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
        ours = {key for group_keys in self._keys for key in group_keys}
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

    def _prepare_field(self, group: Group, field: str, saved: object, where: str) -> None:
        live = group.get(field)
        if isinstance(live, torch.Tensor) and isinstance(saved, SavedTensor):
            if not self._restoring.copy(where, live, saved):
                self._restoring.make(saved, lambda value: group.__setitem__(field, value), live.device)
        else:
            self._restoring.make(saved, lambda value: group.__setitem__(field, value))

    def _prepare_entry(self, parameter: torch.Tensor, saved: Entry | None, path: Path, group: Group) -> None:
        restoring, state = self._restoring, self._optimizer.state
        if saved is None:
            restoring.build(lambda: None, lambda _: state.pop(parameter, None))
            return
        live = cast("Entry", state.get(parameter) or {})
        items = {
            field: self._value(parameter, live.get(field), value, field, join((*path, segment(field))), group)
            for field, value in saved.items()
        }
        restoring.build(
            lambda: {field: build() for field, build in items.items()},
            lambda entry: state.__setitem__(parameter, entry),
        )

    def _value(self, parameter: torch.Tensor, live: object, saved: object, field: str, name: str, group: Group) -> Any:
        """What makes one value: the live tensor, to be copied into, or a new one, or whatever else was saved."""
        restoring = self._restoring
        if not isinstance(saved, SavedTensor):
            restoring.loaded.append(name)
            return lambda: restoring.contents.value(saved, parameter.device)
        entry = restoring.contents.entry(saved)
        if (
            isinstance(live, torch.Tensor)
            and tuple(live.shape) == entry.shape
            and dtype_name(live.dtype) == entry.dtype
            and restoring.copy(name, live, saved)
        ):
            return lambda: live
        restoring.loaded.append(name)
        if field == "step":  # where torch's optimizers want their counters
            device = parameter.device if group.get("capturable") or group.get("fused") else CPU
            return lambda: restoring.contents.value(saved, device)
        if entry.shape != tuple(parameter.shape):
            return lambda: restoring.contents.value(saved, parameter.device)
        if not restoring.same_part(name, parameter, saved):
            return lambda: live
        return lambda: _like(parameter, torch_dtype(entry.dtype), restoring.contents.read(saved))

    def _prepare_others(self, saved: dict[Any, object]) -> None:
        state = cast("dict[Any, object]", self._optimizer.state)
        for key, value in saved.items():
            self._restoring.make(value, functools.partial(state.__setitem__, key))


def _like(parameter: torch.Tensor, dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """The values in a new tensor that lies, and is distributed, as the parameter is."""
    made = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    local = local_of(made)
    if local.numel():
        local.copy_(values)
    return made
