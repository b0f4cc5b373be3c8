"""Optimizers: state under the names of the parameters, so that it finds its weight whatever the order.

The live object is read as it is. No step is run to make state appear, neither at save nor at restore: a restore puts
the saved state where the optimizer keeps it, in the dtype in which it was saved.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptd.errors import StateError
from ckptd.format.names import Key, join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.flat import FlatSlice, FlatViews
from ckptd_client.capture.optimizer_restore import OptimizerRestore
from ckptd_client.capture.template import Template
from ckptd_client.capture.walk import FlatParameters, ParameterNames, Source, Walk

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
    """A :class:`torch.optim.Optimizer` that keeps its state where torch's own do.

    Its tree has ``state``, by parameter; ``param_groups``, a list of the groups' fields without their parameters; and
    ``members``, of each parameter of which this rank has any element the number of its group. So where ranks have other
    parameters, the dicts of all of them unite, and the lists are equal; and a rank that has come to have more than it
    had knows that it has to look at what others saved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, path: Path, *, shared_out_by: torch.optim.Optimizer | None = None
    ) -> None:
        """``shared_out_by``: the one that keeps this rank's share of its state in ``optimizer``. Its groups count: at
        each step it hands their fields on."""
        self.optimizer = optimizer
        self._path = path
        self._front = shared_out_by or optimizer
        self.partitioned = shared_out_by is not None
        """Other ranks keep the state of other parameters, whoever has the parameters themselves."""
        self._parameters: list[torch.Tensor] = []
        self._named_by: tuple[ParameterNames, FlatParameters] = ({}, {})
        self._keys: list[list[Key]] = []  # by group, what each parameter is called
        self._slices: list[tuple[tuple[Key, FlatSlice], ...]] = []  # by parameter: what a flat one consists of
        self._flat_keys: list[Key] = []  # of all groups, one behind the other
        self._ranges: list[tuple[FlatSlice, ...]] = []
        self._members: Any = None
        self._views: dict[tuple[int, object], FlatViews] = {}
        self._state = Template((*path, "state"), fenced=True)
        self._groups = Template((*path, "param_groups"))
        self._others = Template((*path, "others"))
        self.version = 0
        """Grows whenever a parameter has come to stand under another name."""

    def walk(self, walk: Walk) -> Any:
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._name_all(parameters, walk)
        state = cast("Mapping[object, dict[Any, object]]", self.optimizer.state)
        entries: dict[Any, dict[Any, object]] = {}
        having_state = 0
        for i, (key, parameter) in enumerate(zip(self._flat_keys, parameters, strict=True)):
            entry = state.get(parameter)
            if entry is None:
                continue
            having_state += 1
            if self._slices[i]:
                entries |= self._taken_apart(i, parameter, entry)
            else:
                entries[key] = entry
        fields = [
            {name: value for name, value in group.items() if name not in _DERIVED} for group in self._front.param_groups
        ]
        members = [
            ["state", self._state.walk(walk, entries)],
            ["param_groups", self._groups.walk(walk, fields)],
            ["members", self._members],
        ]
        if len(state) > having_state:
            members.append(["others", self._others.walk(walk, self._beside(parameters))])
        return {"$": "dict", "v": members}

    def _taken_apart(
        self, number: int, parameter: torch.Tensor, entry: dict[Any, object]
    ) -> dict[Key, dict[Any, object]]:
        """The state of a flat parameter as that of the ranges in it: what is as long as the parameter, cut as it is;
        all else common to all."""
        named = [(key, one) for key, one in self._slices[number] if one.elements]
        entries: dict[Key, dict[Any, object]] = {key: {} for key, _ in named}
        for field, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == parameter.numel():
                made = self._views.setdefault((number, field), FlatViews())
                views: Sequence[object] = made.of(value, self._ranges[number])
                views = [view for view, (_, one) in zip(views, self._slices[number], strict=True) if one.elements]
            else:
                views = [value] * len(named)
            for (key, _), view in zip(named, views, strict=True):
                entries[key][field] = view
        return entries

    def parents(self) -> Iterator[tuple[str, torch.Tensor, FlatSlice | None]]:
        """What belongs together: the name under which state stands, its parameter, and where in a flat parameter it
        is. Valid after a walk."""
        path = (*self._path, "state")
        for key, parameter, slices in zip(self._flat_keys, self._parameters, self._slices, strict=True):
            if not slices:
                yield join((*path, segment(key))), parameter, None
            for name, one in slices:
                yield join((*path, segment(name))), parameter, one

    def _beside(self, parameters: list[torch.Tensor]) -> dict[object, object]:
        """What the optimizer keeps beside its parameters' state, under keys of its own."""
        state = cast("Mapping[object, object]", self.optimizer.state)
        owned = {id(parameter) for parameter in parameters}
        others = {key: value for key, value in state.items() if id(key) not in owned}
        if any(isinstance(key, torch.Tensor) for key in others):
            raise StateError(f"{join(self._path)}: state of a parameter that is in no group")
        return others

    def _name_all(self, parameters: list[torch.Tensor], walk: Walk) -> None:
        same = len(parameters) == len(self._parameters) and all(map(_is, parameters, self._parameters))
        groups, names = self.optimizer.param_groups, walk.parameter_names
        named_by = (names, walk.flat_parameters)
        as_before = all(map(_is, named_by, self._named_by))
        if same and as_before and [len(g["params"]) for g in groups] == [len(keys) for keys in self._keys]:
            return
        self._parameters, self._named_by = parameters, named_by
        self._keys = [_own_keys(number, group, names) for number, group in enumerate(groups)]
        self._slices = [walk.flat_parameters.get(id(parameter), ((), ()))[1] for parameter in parameters]
        if _repeated(self._all_keys()):  # modules that share names
            for group, keys in zip(groups, self._keys, strict=True):
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) in names:
                        path, name = names[id(parameter)]
                        keys[i] = join((*path, name))
            self._slices = [_with_path(walk.flat_parameters.get(id(parameter))) for parameter in parameters]
        if twice := _repeated(self._all_keys()):
            raise StateError(f"{join(self._path)}: two parameters are called {twice[0]}")
        self._flat_keys = [key for of_group in self._keys for key in of_group]
        members = {key: number for number, of_group in enumerate(self._all_keys()) for key in of_group}
        for key in (key for slices in self._slices for key, one in slices if one.elsewhere):
            del members[key]
        self._members = walk.value(members, (*self._path, "members"))
        self._ranges = [tuple(one for _, one in slices) for slices in self._slices]
        self._views = {}
        self.version += 1

    def _all_keys(self) -> list[list[Key]]:
        """By group, what is in it: in the place of a flat parameter the ones that it consists of."""
        found: list[list[Key]] = []
        slices = iter(self._slices)
        for keys in self._keys:
            found.append([])
            for key in keys:
                found[-1] += [name for name, _ in next(slices)] or [key]
        return found

    def prepare(self, saved: object, restoring: Restoring) -> None:
        names, fields = self._named_by[0], self._front.param_groups
        OptimizerRestore(self.optimizer, fields, self._path, self._keys, self._slices, names, restoring).prepare(saved)


def _own_keys(number: int, group: dict[str, Any], names: ParameterNames) -> list[Key]:
    """What the parameters of a group are called: by their names in their module, else by those that the optimizer was
    given, else by place and shape."""
    given = group.get("param_names") or [None] * len(group["params"])
    keys: list[Key] = []
    for i, (parameter, name) in enumerate(zip(group["params"], given, strict=True)):
        _, known = names.get(id(parameter), ((), name))
        keys.append(known or (number, i, tuple(parameter.shape)))
    return keys


def _with_path(flat: tuple[Path, tuple[tuple[str, FlatSlice], ...]] | None) -> tuple[tuple[Key, FlatSlice], ...]:
    path, slices = flat or ((), ())
    return tuple((join((*path, name)), one) for name, one in slices)


def _is(one: object, other: object) -> bool:
    return one is other


def _repeated(keys: list[list[Key]]) -> list[object]:
    return [key for key, count in Counter(key for group in keys for key in group).items() if count > 1]


def partitioned_optimizer(value: object) -> torch.optim.Optimizer | None:
    """Of torch's ``ZeroRedundancyOptimizer`` the one that has this rank's share of the state. Its own state dict
    gathers that of all ranks. Imports nothing."""
    module = sys.modules.get("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    if kind is None or not isinstance(value, kind):
        return None
    inner = getattr(value, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) and is_plain_optimizer(inner) else None


def is_plain_optimizer(value: object) -> bool:
    """Whether the optimizer keeps its state where torch's own do, without a state dict of its own making."""
    base = torch.optim.Optimizer
    return (
        isinstance(value, base)
        and type(value).state_dict is base.state_dict
        and type(value).load_state_dict is base.load_state_dict
        and not any(getattr(value, hooks) for hooks in _HOOKS)
    )
