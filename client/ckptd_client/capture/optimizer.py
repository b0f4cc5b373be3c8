"""Optimizers: state under the names of the parameters, so that it finds its weight whatever the order.

The live object is read as it is. No step is run to make state appear, neither at save nor at restore: a restore puts
the saved state where the optimizer keeps it, in the dtype in which it was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.errors import StateError
from ckptd.format.names import Key, join
from ckptd.format.tree import Path
from ckptd_client.capture.optimizer_restore import OptimizerRestore
from ckptd_client.capture.template import Template
from ckptd_client.capture.walk import ParameterNames, Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

_DERIVED = frozenset({"params", "param_names"})
"""Fields of a group that say which parameters it has, which the checkpoint does by name."""
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class OptimizerSource(Source):
    """A :class:`torch.optim.Optimizer` that keeps its state where torch's own do."""

    def __init__(self, optimizer: torch.optim.Optimizer, path: Path) -> None:
        self.optimizer = optimizer
        self._path = path
        self._parameters: list[torch.Tensor] = []
        self._names: ParameterNames = {}
        self._keys: list[list[Key]] = []  # by group, what each parameter is called
        self._state = Template((*path, "state"), fenced=True)
        self._groups = Template((*path, "param_groups"))
        self._others = Template((*path, "others"))

    def walk(self, walk: Walk) -> Any:
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._name_all(parameters, walk.parameter_names)
        state = cast("Mapping[object, dict[Any, object]]", self.optimizer.state)
        keys = [key for of_group in self._keys for key in of_group]
        entries = {
            key: entry
            for key, parameter in zip(keys, parameters, strict=True)
            if (entry := state.get(parameter)) is not None
        }
        fields = [
            {"params": of_group} | {name: value for name, value in group.items() if name not in _DERIVED}
            for of_group, group in zip(self._keys, groups, strict=True)
        ]
        members = [
            ["state", self._state.walk(walk, entries)],
            ["param_groups", self._groups.walk(walk, fields)],
        ]
        if len(state) > len(entries):
            members.append(["others", self._others.walk(walk, self._beside(parameters))])
        return {"$": "dict", "v": members}

    def _beside(self, parameters: list[torch.Tensor]) -> dict[object, object]:
        """What the optimizer keeps beside its parameters' state, under keys of its own."""
        state = cast("Mapping[object, object]", self.optimizer.state)
        owned = {id(parameter) for parameter in parameters}
        others = {key: value for key, value in state.items() if id(key) not in owned}
        if any(isinstance(key, torch.Tensor) for key in others):
            raise StateError(f"{join(self._path)}: state of a parameter that is in no group")
        return others

    def _name_all(self, parameters: list[torch.Tensor], names: ParameterNames) -> None:
        same = len(parameters) == len(self._parameters) and all(map(_is, parameters, self._parameters))
        groups = self.optimizer.param_groups
        if same and names is self._names and [len(g["params"]) for g in groups] == [len(keys) for keys in self._keys]:
            return
        self._parameters, self._names = parameters, names
        self._keys = [_own_keys(number, group, names) for number, group in enumerate(groups)]
        if _repeated(self._keys):  # modules that share names
            for group, keys in zip(groups, self._keys, strict=True):
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) in names:
                        path, name = names[id(parameter)]
                        keys[i] = join((*path, name))
        if twice := _repeated(self._keys):
            raise StateError(f"{join(self._path)}: two parameters are called {twice[0]}")

    def prepare(self, saved: object, restoring: Restoring) -> None:
        OptimizerRestore(self.optimizer, self._path, self._keys, restoring).prepare(saved)


def _own_keys(number: int, group: dict[str, Any], names: ParameterNames) -> list[Key]:
    """What the parameters of a group are called: by their names in their module, else by those that the optimizer was
    given, else by place and shape."""
    given = group.get("param_names") or [None] * len(group["params"])
    keys: list[Key] = []
    for i, (parameter, name) in enumerate(zip(group["params"], given, strict=True)):
        _, known = names.get(id(parameter), ((), name))
        keys.append(known or (number, i, tuple(parameter.shape)))
    return keys


def _is(one: object, other: object) -> bool:
    return one is other


def _repeated(keys: list[list[Key]]) -> list[object]:
    return [key for key, count in Counter(key for group in keys for key in group).items() if count > 1]


def is_plain_optimizer(value: object) -> bool:
    """Whether the optimizer keeps its state where torch's own do, without a state dict of its own making."""
    base = torch.optim.Optimizer
    return (
        isinstance(value, base)
        and type(value).state_dict is base.state_dict
        and type(value).load_state_dict is base.load_state_dict
        and not any(getattr(value, hooks) for hooks in _HOOKS)
    )
