"""Optimizer state of tied parameters, where the tie was made or cut between save and restore.

A tied parameter has its state once, under the first of its names. Where two pipeline stages have a copy each, both have
state; where one process has both, tied, there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckptd.format.names import Key, join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

Entry = dict[Any, object]
Live = Mapping[Key, tuple[torch.Tensor, Path, str]]
"""By key in the optimizer: the parameter, where its module is in the state, and what it is called there."""


class SavedStates:
    """What a checkpoint has of the parameters of one optimizer, by key."""

    def __init__(self, of_group: dict[Key, int], entries: dict[Key, Entry]) -> None:
        self.of_group = of_group
        """Of each parameter the number of its group."""
        self.entries = entries
        """The state of those that have some."""

    def named_as(self, live: Live, where: Path, restoring: Restoring) -> SavedStates:
        """The same under the names that are live. ``where``: the optimizer's state, as messages name it. Where one live
        parameter stands for two saved ones, a note is made unless their states are equal."""
        ties, aliases = restoring.ties, restoring.contents.aliases
        further = [key for key in self.of_group if key not in live] if ties else []
        lacking = [key for key in live if key not in self.of_group] if aliases or ties else []
        if not further and not lacking:
            return self
        found = SavedStates(dict(self.of_group), dict(self.entries))
        paths = {path for _, path, _ in live.values()}
        saved = {name: key for key in self.of_group for name in _full_names(key, paths)}
        names = {join((*path, segment(name))): key for key, (_, path, name) in live.items()}
        tied: dict[str, list[str]] = {}
        for alias, name in ties.items():
            tied.setdefault(name, []).append(alias)
        for name, key in names.items():
            if key in self.of_group:
                continue
            others = [aliases.get(name), *tied.get(name, ())]
            source = next((saved[other] for other in others if other in saved), None)
            if source is not None:
                found._take(key, source)
        for key in further:
            owner = next((names.get(ties.get(name, "")) for name in _full_names(key, paths) if name in ties), None)
            if owner is not None and owner in found.of_group:
                found._compare(key, owner, live[owner][0], where, restoring)
                del found.of_group[key]
        return found

    def _take(self, key: Key, source: Key) -> None:
        self.of_group[key] = self.of_group[source]
        if source in self.entries:
            self.entries[key] = self.entries[source]

    def _compare(self, key: Key, owner: Key, parameter: torch.Tensor, where: Path, restoring: Restoring) -> None:
        one, other = self.entries.get(key, {}), self.entries.get(owner, {})
        name = join((*where, segment(key)))
        if one is other or not restoring.takes(name):
            return
        part = restoring.part_of(parameter)
        for field in one.keys() | other.keys():
            values = one.get(field), other.get(field)
            if isinstance(values[0], SavedTensor) and isinstance(values[1], SavedTensor):
                if all(restoring.can_be_had(name, value) for value in values):
                    restoring.compare(values[0].name, values[1].name, part)
            elif values[0] != values[1]:
                restoring.mismatch(name, f"tied to {owner!r} here, and has another {field} in the checkpoint")


def _full_names(key: Key, paths: set[Path]) -> list[str]:
    """What a parameter with this key may be called in the whole state: the key has the name of the module only where
    several share names."""
    if not isinstance(key, str):
        return []
    return [key, *(join((*path, segment(key))) for path in paths)]
