"""What a restore is going to do: checked as a whole first, then done in an order in which nothing undoes another.

Checks change nothing. Then, when all is known to fit: memory is allocated; objects that load by themselves do so, and
are put back if one of them refuses; tensors are copied; plain values, optimizer state and parameter groups are set;
random-number generators come last, after all code that might draw from them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ckptd.errors import MismatchError, first_line
from ckptd.format.names import join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.contents import CPU, Contents
from ckptd_client.capture.dtensor import local_of, part_of
from ckptd_client.dtypes import dtype_name

NAMES_SHOWN = 8
"""How many names an error lists of each kind."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a restore found."""

    loaded: tuple[str, ...]
    """Names of tensors, and of objects and plain values at the level at which they were taken."""
    missing: tuple[str, ...]
    """Live, and not in the checkpoint: left as they are."""
    unexpected: tuple[str, ...]
    """In the checkpoint, and not live."""
    skipped: tuple[tuple[str, str], ...]
    """Name and reason: in both, and not taken all the same."""
    notices: tuple[str, ...]
    """What is worth a look although everything was taken."""


@dataclass(slots=True)
class _Load:
    """An object that loads by itself, and what puts it back."""

    name: str
    get: Callable[[], object]
    set: Callable[[Any], object]
    build: Callable[[], object]
    value: object = None


@dataclass
class Restoring:
    """One restore in the making."""

    contents: Contents
    loaded: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    mismatches: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    notices: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._builds: list[tuple[Callable[[], object], Callable[[Any], object]]] = []
        self._loads: list[_Load] = []
        self._copies: list[tuple[torch.Tensor, SavedTensor]] = []
        self._last: list[Callable[[], object]] = []

    # Checks

    def common(self, live: Iterable[str], found: Mapping[str, object], path: Path) -> list[str]:
        """Names on both sides, in live order. Those on one side only are noted as missing or unexpected."""
        wanted = dict.fromkeys(live)
        self.missing += [join((*path, segment(name))) for name in wanted if name not in found]
        self.unexpected += [join((*path, segment(name))) for name in found if name not in wanted]
        return [name for name in wanted if name in found]

    def mismatch(self, name: str, reason: str) -> None:
        """Note that live and saved value do not fit: an error when strict, else the value is skipped."""
        self.mismatches.append((name, reason))

    def skip(self, name: str, reason: str) -> None:
        """Note what cannot be taken, which is no error."""
        self.skipped.append((name, reason))

    def fits(self, name: str, live: torch.Tensor, saved: SavedTensor) -> bool:
        """Whether the saved tensor can be copied into the live one; notes why not."""
        entry = self.contents.entry(saved)
        shape, dtype = tuple(live.shape), dtype_name(live.dtype)
        if entry.shape != shape:
            self.mismatch(name, f"shape {entry.shape} in the checkpoint, {shape} here")
        elif entry.dtype != dtype:
            self.mismatch(name, f"dtype {entry.dtype} in the checkpoint, {dtype} here")
        else:
            return self.same_part(name, live, saved)
        return False

    def same_part(self, name: str, live: torch.Tensor, saved: SavedTensor) -> bool:
        """Whether the part of ``live`` that this rank holds is the one that it saved; notes where it is not."""
        _, box, span = part_of(name, live)
        here = [(piece.box, piece.span) for piece in self.contents.entry(saved).pieces]
        if local_of(live).numel() and (box is not None or span is not None) and (box, span) not in here:
            self.mismatch(name, "this rank holds another part of the tensor than when it was saved")
            return False
        return True

    # Plans

    def copy(self, name: str, live: torch.Tensor, saved: SavedTensor) -> bool:
        """Plan to copy a tensor in place. False where that cannot be, as elements of the live one share memory: the
        caller is to put a tensor of its own there."""
        if not self.fits(name, live, saved):
            return True
        self.loaded.append(name)
        local = local_of(live)
        if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
            self.notices.append(f"{name}: elements shared memory; replaced by a tensor of its own")
            return False
        if local.numel():
            self._copies.append((local, saved))
        return True

    def make(self, saved: object, put: Callable[[Any], object], device: torch.device = CPU) -> None:
        """Plan to build a saved value with tensors on ``device``, and to ``put`` it somewhere."""
        self.build(lambda: self.contents.value(saved, device), put)

    def build(self, build: Callable[[], object], put: Callable[[Any], object]) -> None:
        """Plan to make a value while everything may still fail, and to ``put`` it when nothing may."""
        self._builds.append((build, put))

    def load(self, name: str, saved: object, get: Callable[[], object], set_: Callable[[Any], object]) -> None:
        """Plan to hand a value to an object that loads by itself. ``get`` gives what puts it back."""
        self._loads.append(_Load(name, get, set_, lambda: self.contents.value(saved, CPU, get())))
        self.loaded.append(name)

    def last(self, act: Callable[[], object]) -> None:
        """Plan what must come after everything else."""
        self._last.append(act)

    # The end

    def check_ties(self, live: Mapping[str, str], names: Iterable[str]) -> None:
        """Compare ties: ``live`` gives the aliases among the live ``names``."""
        contents = self.contents
        for alias, name in live.items():
            if contents.has(alias) and contents.has(name) and contents.differ(alias, name):
                self.mismatch(alias, f"tied to {name} here, and another value in the checkpoint")
        there = set(names)
        for alias, name in contents.aliases.items():
            if {alias, name} <= there and live.get(alias, alias) != live.get(name, name):
                self.notices.append(f"{alias}: tied to {name} in the checkpoint and not here; both got its value")

    def finish(self, *, strict: bool) -> Report:
        """Everything was looked at. Raises :class:`MismatchError` where strict and something does not fit."""
        if strict and (self.missing or self.unexpected or self.mismatches):
            kinds = {
                "missing from the checkpoint": self.missing,
                "unexpected in the checkpoint": self.unexpected,
                "does not fit": [f"{name} ({reason})" for name, reason in self.mismatches],
            }
            problems = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
            raise MismatchError(
                "the checkpoint does not fit the live state; " + "; ".join(problems),
                hint="strict=False takes what fits and reports the rest",
            )
        return Report(
            loaded=tuple(dict.fromkeys(self.loaded)),
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            skipped=(*self.skipped, *self.mismatches),
            notices=tuple(self.notices),
        )

    def apply(self) -> None:
        """Do what was planned. Raises with the live state as it was where an object refuses what was saved."""
        with torch.no_grad():
            built = [(put, build()) for build, put in self._builds]
            for load in self._loads:
                load.value = load.build()
            self._load_all()
            for live, saved in self._copies:
                live.copy_(self.contents.read(saved))
            for put, value in built:
                put(value)
            for act in self._last:
                act()

    def _load_all(self) -> None:
        done: list[tuple[_Load, object]] = []
        for load in self._loads:
            done.append((load, copy_of(load.get())))
            try:
                load.set(load.value)
            except Exception as error:
                changed = [other.name for other, before in reversed(done) if not _put_back(other, before)]
                raise MismatchError(
                    f"{load.name}: the object does not take what was saved: {first_line(error)}",
                    hint=f"not put back either: {_some(changed)}" if changed else "the live state is as it was",
                ) from error


def _put_back(load: _Load, before: object) -> bool:
    try:
        load.set(before)
    except Exception:
        return False
    return True


def copy_of(value: object) -> object:
    """A copy that shares no memory with the live state; tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        mapping = cast("dict[Any, object]", value)
        return type(mapping)((key, copy_of(item)) for key, item in mapping.items())
    if type(value) in (list, tuple):
        return cast("type[list[object]]", type(value))(copy_of(item) for item in cast("list[object]", value))
    return copy.deepcopy(value)


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
