"""One checkpoint, as one rank reads it: what a restore needs to know of it, wherever its bytes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ckptd.checkpoint.regions import Region


class Described(NamedTuple):
    """A stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the global tensor."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A part of a stored tensor. Equal to itself alone, which is found in less time."""

    tensor: Described
    region: Region


class InCommon(NamedTuple):
    """Of the state trees of all ranks."""

    tree: bytes
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Amount:
    """What one rank has read in a restore, of tensors."""

    bytes_wanted: int = 0
    """That went to new memory: what lies as it is wanted in this node's memory is used where it lies."""
    bytes_read: int = 0
    """For them: only whole digest blocks can be verified."""
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who restores, and who saved."""

    rank: int = 0
    world: int = 1
    saved_world: int = 1
    identity: str = ""
    """Of the checkpoint; for what is derived from it and from nothing else."""

    @property
    def same(self) -> bool:
        """As many as there were: each takes up its own values."""
        return self.world == self.saved_world


class Stored(Protocol):
    """One checkpoint. Everything but :meth:`fetch` and :meth:`in_common` is in memory."""

    ranks: Ranks
    tree: bytes
    """Typed JSON: this rank's own where as many ranks restore as saved, else what all of them have in common."""
    amount: Amount
    """Of the last :meth:`fetch`."""
    aliases: Mapping[str, str]
    """Further names of a stored tensor → the name under which it is stored."""

    def describe(self, name: str) -> Described | None:
        """The tensor stored under a name, ties not followed: the world's, or this rank's own. ``None`` where there is
        none, or each of another number of ranks had its own."""
        ...

    def in_common(self) -> InCommon:
        """What all ranks that saved have in common, for a rank that now has something which it had not then. Blocking;
        raises what reading raises."""
        ...

    def fetch(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """The elements of each part, verified, flat and on the CPU, in the saved dtype; not to be written to. Valid as
        long as the tensors are held and the restore goes on. Blocking; raises what reading raises."""
        ...

    def of_each_rank(self, part: str) -> Sequence[Any] | None:
        """What each of the ranks that saved had in the place of an object, in order of rank, as nodes of their trees;
        ``None`` where that was not asked for."""
        ...
