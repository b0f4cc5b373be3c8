"""What a restore is going to do: checked as a whole first, then done in an order in which nothing undoes another.

Checks change nothing. Then, when all is known to fit: memory is allocated; objects that load by themselves do so, and
are put back if one of them refuses; tensors are copied; plain values, optimizer state and parameter groups are set;
random-number generators come last, after all code that might draw from them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ckptd.errors import MismatchError, first_line
from ckptd.format.names import join, segment
from ckptd.format.tree import Path
from ckptd_client.capture.codecs import SavedTensor
from ckptd_client.capture.contents import CPU, Contents, bits
from ckptd_client.capture.copying import copy_all, shaped_as
from ckptd_client.capture.misfit import misfit, some
from ckptd_client.capture.parts import Part
from ckptd_client.capture.selection import EVERYTHING, NOTHING, Selection, unmatched
from ckptd_client.capture.stored import Wanted
from ckptd_client.dtypes import dtype_name


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
    parts: Mapping[str, Part]
    """What this rank holds of each live tensor, by name."""
    ties: Mapping[str, str]
    """Further names of live tensors → the names under which these are saved."""
    part_of: Callable[[torch.Tensor], Part]
    """The same of a parameter."""
    selection: Selection = EVERYTHING
    """What is to be taken."""
    cast: Selection = NOTHING
    """Tensors that may be taken in another dtype than that in which they were saved."""
    loaded: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    mismatches: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    other_dtypes: list[str] = field(default_factory=list[str])
    """Those of the mismatches that would fit if they were cast."""
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    notices: list[str] = field(default_factory=list[str])
    asked: set[str] = field(default_factory=set[str])
    """The names that the selection may take or leave; not kept where it takes everything."""

    def __post_init__(self) -> None:
        self._builds: list[tuple[Callable[[], object], Callable[[Any], object]]] = []
        self._loads: list[_Load] = []
        self._copies: list[tuple[torch.Tensor, Wanted]] = []
        self._ties: list[tuple[str, str, list[tuple[Wanted, Wanted]]]] = []
        self._last: list[Callable[[], object]] = []

    # Checks

    def takes(self, name: str) -> bool:
        """Whether what has this name is to be taken."""
        if not self.selection.everything:
            self.asked.add(name)
        return self.selection.takes(name)

    def unmatched(self) -> dict[str, list[str]]:
        """Patterns of the caller's that stand for nothing on this rank, and what may have been meant by each."""
        chosen = unmatched(self.selection.patterns, self.asked)
        return chosen | unmatched(self.cast.patterns, [*self.parts, *self.ties])

    def common(self, live: Iterable[Any], found: Mapping[Any, object], path: Path) -> list[Any]:
        """Keys on both sides that are to be taken, in live order. Those on one side only are noted as missing or
        unexpected."""
        wanted = {key: join((*path, segment(key))) for key in live}
        self.missing += [name for key, name in wanted.items() if key not in found and self.takes(name)]
        others = [join((*path, segment(key))) for key in found if key not in wanted]
        self.unexpected += [name for name in others if self.takes(name)]
        return [key for key, name in wanted.items() if key in found and self.takes(name)]

    def mismatch(self, name: str, reason: str) -> None:
        """Note that live and saved value do not fit: an error when strict, else the value is skipped."""
        self.mismatches.append((name, reason))

    def skip(self, name: str, reason: str) -> None:
        """Note what cannot be taken, which is no error."""
        self.skipped.append((name, reason))

    def can_be_had(self, name: str, saved: object) -> bool:
        """Whether a value can be made on this rank; notes why not, where it was each rank's own."""
        reason = self.contents.missing_here(saved)
        if reason is not None:
            self.mismatch(name, reason)
        return reason is None

    def fits(self, name: str, saved: SavedTensor, dtypes: Sequence[torch.dtype] = ()) -> bool:
        """Whether the saved tensor can be copied into the live one of this name; notes why not. ``dtypes``: those that
        the live one has by turns."""
        if not self.can_be_had(name, saved):
            return False
        entry, part = self.contents.entry(saved), self.parts[name]
        dtype = dtype_name(part.local.dtype)
        if entry.shape != part.shape:
            self.mismatch(name, f"shape {entry.shape} in the checkpoint, {part.shape} here")
        elif entry.dtype in map(dtype_name, dtypes):
            return True
        elif entry.dtype != dtype and not self.cast.takes(name):
            self.other_dtypes.append(name)
            self.mismatch(name, f"dtype {entry.dtype} in the checkpoint, {dtype} here")
        else:
            if entry.dtype != dtype:
                self.notices.append(f"{name}: cast from {entry.dtype} to {dtype}")
            return True
        return False

    # Plans

    def copy(self, name: str, saved: SavedTensor, dtypes: Sequence[torch.dtype] = ()) -> bool:
        """Plan to copy what this rank holds of the live tensor of this name, in place. False where that cannot be, as
        elements of the live one share memory: the caller is to put a tensor of its own there. ``dtypes``: those that
        the live one has by turns."""
        if not self.fits(name, saved, dtypes):
            return True
        self.loaded.append(name)
        pieces = self.parts[name].each()
        for piece in pieces:
            local = piece.local
            if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
                self.notices.append(f"{name}: elements shared memory; replaced by a tensor of its own")
                return False
        self._copies += [
            (piece.local, self.contents.want(saved, piece.box or piece.span)) for piece in pieces if piece.local.numel()
        ]
        return True

    def make(self, name: str, saved: object, put: Callable[[Any], object], device: torch.device = CPU) -> None:
        """Plan to build a saved value with tensors on ``device``, and to ``put`` it somewhere."""
        if self.can_be_had(name, saved):
            self.contents.want_all(saved)
            self.build(lambda: self.contents.value(saved, device), put)

    def build(self, build: Callable[[], object], put: Callable[[Any], object]) -> None:
        """Plan to make a value while everything may still fail, and to ``put`` it when nothing may. Tensors of the
        checkpoint that it needs have to be wanted."""
        self._builds.append((build, put))

    def load(self, name: str, saved: object, get: Callable[[], object], set_: Callable[[Any], object]) -> None:
        """Plan to hand a value to an object that loads by itself. ``get`` gives what puts it back."""
        if self.can_be_had(name, saved):
            self.contents.want_all(saved)
            self._loads.append(_Load(name, get, set_, lambda: self.contents.value(saved, CPU, get())))
            self.loaded.append(name)

    def last(self, act: Callable[[], object]) -> None:
        """Plan what must come after everything else."""
        self._last.append(act)

    def compare_ties(self, names: Iterable[str]) -> None:
        """Plan to compare tied tensors, whose values in the checkpoint must be equal. ``names``: all live ones."""
        contents, live = self.contents, self.ties
        for alias, name in live.items():
            if self.takes(alias):
                self.compare(alias, name, self.parts[name])
        there = set(names)
        for alias, name in contents.aliases.items():
            if {alias, name} <= there and live.get(alias, alias) != live.get(name, name):
                self.notices.append(f"{alias}: tied to {name} in the checkpoint and not here; both got its value")

    def compare(self, alias: str, name: str, part: Part) -> None:
        """Plan to compare what the checkpoint has under two names, as far as this rank holds it, which must be equal as
        the live ones are tied."""
        contents = self.contents
        one, other = contents.find(alias), contents.find(name)
        if one is None or other is None or one is other:
            return
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        held = [piece.box or piece.span for piece in part.each()] if one.shape == part.shape else [None]
        wanted = [(contents.want(SavedTensor(alias), piece), contents.want(SavedTensor(name), piece)) for piece in held]
        self._ties.append((alias, name, wanted if alike else []))

    # The end

    def fetch(self) -> None:
        """Read and verify all that the plan needs, and compare ties."""
        self.contents.fetch()
        read = self.contents.read
        for alias, name, wanted in self._ties:
            if not wanted or any(not torch.equal(bits(read(one)), bits(read(other))) for one, other in wanted):
                self.mismatch(alias, f"tied to {name} here, and another value in the checkpoint")

    def check(self, *, strict: bool) -> None:
        """Raise :class:`MismatchError` where strict and something does not fit. What this rank does not expect may be
        another rank's: with several, that is for :func:`refuse_unexpected`."""
        unexpected = self.unexpected if self.contents.ranks.world == 1 else []
        if strict and (self.missing or unexpected or self.mismatches):
            raise misfit(self.missing, unexpected, self.mismatches, self.other_dtypes)

    def report(self) -> Report:
        """What was found."""
        return Report(
            loaded=tuple(dict.fromkeys(self.loaded)),
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            skipped=(*self.skipped, *self.mismatches),
            notices=tuple(self.notices),
        )

    def apply(self) -> None:
        """Do what was planned, once. Raises with the live state as it was where an object refuses what was saved."""
        with torch.no_grad():
            built = [(put, build()) for build, put in self._builds]
            for load in self._loads:
                load.value = load.build()
            self._load_all()
            read = self.contents.read
            copy_all([(live, shaped_as(live, read(wanted))) for live, wanted in self._copies])
            for put, value in built:
                put(value)
            for act in self._last:
                act()
        self._let_go()

    def _let_go(self) -> None:
        """Of the plan, which refers to itself: Python would have to search all of it to see that it is garbage."""
        for planned in (self._builds, self._loads, self._copies, self._ties, self._last):
            planned.clear()
        self.contents.let_go()

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
                    hint=f"not put back either: {some(changed)}" if changed else "the live state is as it was",
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
