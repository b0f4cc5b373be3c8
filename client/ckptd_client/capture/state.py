"""The whole training state: captured as it is, and applied again once everything was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ckptd.errors import StateError
from ckptd.format.names import element, join, segment
from ckptd.format.tree import Path
from ckptd.limits import NAME_BYTES_MAX, TREE_DEPTH_MAX
from ckptd_client.capture.contents import Contents, decode_tree
from ckptd_client.capture.flat import FlatPartition, FlatSource
from ckptd_client.capture.holdings import Declared, Holdings, Known, Parameter
from ckptd_client.capture.leaves import Leaf, Leaves, Structure
from ckptd_client.capture.module import ModuleSource
from ckptd_client.capture.objects import Reshapes, keeps_state
from ckptd_client.capture.optimizer import OptimizerSource
from ckptd_client.capture.parts import Part
from ckptd_client.capture.restore import Report, Restoring
from ckptd_client.capture.rng import RNG, RngSource
from ckptd_client.capture.selection import EVERYTHING, NOTHING, Selection, refuse_unmatched
from ckptd_client.capture.shares import Placement
from ckptd_client.capture.sources import flat_parameters, make_source, parameter_names
from ckptd_client.capture.stored import Amount, Ranks, Stored
from ckptd_client.capture.template import Template
from ckptd_client.capture.values import Build, merge
from ckptd_client.capture.walk import FlatParameters, ParameterNames, Source, Walk

T = TypeVar("T")
_Sources = dict[tuple[Path, int], tuple[object, Source]]


@dataclass(frozen=True, slots=True)
class Capture:
    """The state at one moment: what to copy, and the tree of everything else, which is a copy already."""

    leaves: list[Leaf]
    """In order of first appearance. The same list object as in the last capture as long as no leaf moved."""
    aliases: dict[str, str]
    """Further names of the same memory → the leaf's name."""
    tree: bytes
    """Typed JSON of a dict of the parts."""
    tops: tuple[str, ...]
    """The names at the top of the state."""
    structure: Structure
    """The same object as long as names, shapes, dtypes, parts, ties and order are unchanged."""
    notices: tuple[str, ...]
    """What is saved as it is, and may not be what was meant."""
    parts: Mapping[str, Part]
    """What this rank holds of each tensor, by name, aliases included. Made when first asked."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A restore that was found to fit."""

    report: Report
    ranks: Ranks
    amount: Amount
    values: dict[str, object]
    """The checkpoint's whole tree; where it has a tensor, a :class:`~ckptd_client.capture.codecs.SavedTensor`."""
    unmatched: Mapping[str, Sequence[str]]
    """Patterns that stand for nothing on this rank, and what may have been meant by each."""
    _apply: Callable[[], None]

    def apply(self) -> None:
        """Bring everything into the live state.

        Raises :class:`MismatchError` where an object of the state refuses what it had saved, and then, as for any
        failure to get memory, the live state is as it was.
        """
        self._apply()


class State:
    """The parts of a training state, by name."""

    def __init__(
        self,
        state: Mapping[str, object],
        *,
        world: int,
        rng: bool,
        rank: int | None = None,
        replicated: Declared = (),
    ) -> None:
        """``state``: anything with ``state_dict()`` and ``load_state_dict()``, or tensors and plain values in nested
        dicts, lists and tuples. ``rank``: else the process group's. ``replicated``: the plain tensors that are equal on
        all ranks, ``True`` for all of them or patterns of names. Raises :class:`StateError` for a name that cannot be
        kept."""
        self._state = state
        self._rng = RngSource() if rng else None
        self._sources: _Sources = {}
        self._last_sources: _Sources = {}  # those of the last capture; what is gone from the state is let go of
        self._template = Template((), find=self._source)
        self._world = world
        self._replicated: Declared = replicated
        self._leaves = Leaves(Placement(_rank() if rank is None else rank, world))
        self._names: ParameterNames = {}  # the same object as long as no parameter moved
        self._names_stand_for: list[tuple[ModuleSource | FlatSource, int]] = []
        self._changes = 0  # how often anything has come to stand under another name
        self._flat_parameters: FlatParameters = {}
        self._known: dict[int, Known] = {}
        self._owned: set[int] = set()
        self._check_names()

    def _check_names(self) -> None:
        for name in cast("Mapping[object, object]", self._state):
            if not isinstance(name, str) or not name:
                raise StateError(f"{name!r}: the parts of the state have names: strings that are not empty")
            try:
                size = len(name.encode())
            except UnicodeEncodeError:
                raise StateError(f"{name!r}: not a name that can be written as UTF-8") from None
            if size > NAME_BYTES_MAX:
                raise StateError(f"{name[:80]}…: a name of more than {NAME_BYTES_MAX} bytes")
            if name == RNG and self._rng is not None:
                raise StateError(f"{RNG}: this part is the random-number state", hint="rename yours, or use rng=False")

    # Looking

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer in the state, in order."""
        return [found for _, found in self._find_all(torch.optim.Optimizer)]

    def scalers(self) -> list[GradScaler]:
        """Every gradient scaler in the state, in order."""
        return [found for _, found in self._find_all(GradScaler)]

    def _find_all(self, kind: type[T]) -> Iterator[tuple[Path, T]]:
        """Objects of a kind and where they are, through dicts, lists and tuples."""
        wanted: Any = (kind, dict, list, tuple)
        places: list[tuple[Path, object]] = [((), dict(self._state))]
        while places:
            path, value = places.pop()
            if isinstance(value, kind):
                yield path, value
                continue
            if len(path) > TREE_DEPTH_MAX:
                continue  # too deep to be captured, or a cycle
            if isinstance(value, dict):
                inner = [(segment(k), v) for k, v in cast("dict[Any, object]", value).items() if isinstance(v, wanted)]
            else:
                inner = [(element(i), v) for i, v in enumerate(cast("list[object]", value)) if isinstance(v, wanted)]
            places += [((*path, step), item) for step, item in reversed(inner)]

    def _source(self, value: object, path: Path) -> Source | None:
        """The source of an object with a state of its own, the same one from capture to capture."""
        place = (path, id(value))
        known = self._sources.get(place) or self._last_sources.get(place)
        if known is None:
            source = make_source(value, path)
            if source is None:
                return None
            known = (value, source)  # holds the object, so that its id stays its own
        self._sources[place] = known
        return known[1]

    def _refresh(self) -> None:
        """Find modules and optimizers, and what parameters are called and which an optimizer owns."""
        found = [(path, self._source(module, path)) for path, module in self._find_all(nn.Module)]
        modules = [(path, source) for path, source in found if isinstance(source, ModuleSource)]
        for _, source in modules:
            source.refresh()
        self._owned = {
            id(parameter)
            for optimizer in self.optimizers()
            for g in optimizer.param_groups
            for parameter in g["params"]
        }
        for _, source in modules:
            self._owned |= set(source.owned_pieces(self._owned))
        flat = [(path, self._source(partition, path)) for path, partition in self._find_all(FlatPartition)]
        partitions = [(path, source) for path, source in flat if isinstance(source, FlatSource)]
        sources: list[ModuleSource | FlatSource] = [
            *(source for _, source in partitions),
            *(source for _, source in modules),
        ]
        versions = [(source, source.version) for source in sources]
        if versions != self._names_stand_for:
            self._names_stand_for = versions
            self._changes += 1
            self._names = parameter_names(modules)
            self._flat_parameters = flat_parameters(modules, partitions)
            self._known = {place: known for source in sources for place, known in source.known().items()}

    def place(self, placement: Placement) -> None:
        """Say where the ranks are, once that is known."""
        if self._world > 1:  # else it makes no difference
            self._leaves.placement = placement
            self._leaves.forget()

    def _holdings(self) -> Holdings:
        """What is known of the tensors of the last walk."""
        found = Holdings(self._world, self._replicated, self._known)
        parameters: dict[str, Parameter] = {}
        for _, source in self._sources.values():
            if isinstance(source, OptimizerSource):
                for name, parameter, one in source.parents():
                    known = found.parameter(name, parameter, None if one is None else one.flat)
                    parameters[name] = msgspec.structs.replace(known, partitioned=source.partitioned)
        return replace(found, parameters=parameters)

    # Capture

    def capture(self) -> Capture:
        """Look at everything and copy what is not a tensor.

        Changes nothing: no step, no random number, no collective, no wait for a device. Raises :class:`StateError`,
        naming the path, for what cannot be saved.
        """
        self._check_names()
        self._last_sources, self._sources = self._sources, {}
        self._refresh()
        walk = Walk(self._names, self._owned, self._flat_parameters)
        tops = self._template.walk(walk, dict(self._state))["v"]
        if self._rng is not None:
            tops = [*tops, [RNG, self._rng.walk(walk)]]
        kept = self._leaves
        optimizers = [s for _, s in self._sources.values() if isinstance(s, OptimizerSource)]
        context = (self._changes, [(source, source.version) for source in optimizers])
        kept.update(walk.names, walk.tensors, walk.fenced, context, self._holdings)
        return Capture(
            kept.leaves,
            kept.aliases,
            msgspec.json.encode({"$": "dict", "v": tops}),
            tuple(str(name) for name, _ in tops),
            kept.structure,
            kept.notices,
            kept.parts,
        )

    # Restore

    def prepare(
        self, stored: Stored, *, strict: bool, selection: Selection = EVERYTHING, cast_: Selection = NOTHING
    ) -> Prepared:
        """Check a checkpoint against the live state, plan the restore, read and verify all that it needs. Changes
        nothing.

        Raises :class:`ckptd.errors.ConfigError` for a pattern that stands for nothing, where this is the only rank,
        :class:`MismatchError` where strict and anything does not fit, :class:`StateError` where the
        random-number state cannot be used, :class:`FormatError` for a tree that is malformed, and what reading raises.
        """
        live = self.capture()
        holdings = Holdings(self._world, self._replicated, self._known)

        def part_of(parameter: torch.Tensor) -> Part:
            return holdings.part("parameter", parameter)

        def planned(saved: dict[str, object], contents: Contents) -> Restoring:
            restoring = Restoring(contents, live.parts, live.aliases, part_of, selection, cast_)
            self._plan(live, saved, restoring)
            return restoring

        saved = decode_tree(stored.tree)
        restoring = planned(saved, Contents(stored))
        if restoring.missing and stored.ranks.same and stored.ranks.world > 1:  # another rank may have saved it
            contents = Contents(stored)
            saved = contents.widen()
            restoring = planned(saved, contents)
        nothing = restoring.unmatched()
        if stored.ranks.world == 1:  # else it may be on another rank
            refuse_unmatched(nothing)
        restoring.check(strict=strict)
        restoring.fetch()
        restoring.check(strict=strict)  # of ties, the values had to be read first

        return Prepared(restoring.report(), stored.ranks, stored.amount, saved, nothing, restoring.apply)

    def _plan(self, live: Capture, saved: dict[str, object], restoring: Restoring) -> None:
        """All that is to be done, with nothing read yet."""
        if not restoring.selection.everything:
            restoring.asked.update(live.tops, saved, self.module_names())
        restoring.missing += [name for name in live.tops if name not in saved and restoring.takes(name)]
        unexpected = [name for name in saved if name not in live.tops and restoring.takes(name)]
        if RNG in unexpected and self._rng is None:
            unexpected.remove(RNG)
            restoring.skip(RNG, "rng=False")
        restoring.unexpected += unexpected
        builds = self._plan_tops([name for name in live.tops if name in saved], saved, restoring)
        self._plan_parts(builds, restoring)
        restoring.compare_ties([*(leaf.name for leaf in live.leaves), *live.aliases])

    def _plan_tops(self, names: list[str], saved: dict[str, object], restoring: Restoring) -> dict[str, Build]:
        builds: dict[str, Build] = {}
        for name in names:
            if name == RNG and self._rng is not None:
                if restoring.takes(name):
                    self._rng.prepare(saved[name], restoring)
            elif not self._can_take(name):
                restoring.skip(name, "the state is a mapping that cannot be written to")
            else:
                builds[name] = merge(self._state[name], saved[name], (segment(name),), restoring, self._source)
        return builds

    def module_names(self) -> list[str]:
        """Where the modules of the state are."""
        return [join(path) for path, _ in self._find_all(nn.Module)]

    def to_come(self, names: Iterable[str]) -> list[str]:
        """Where there may be tensors later: optimizers that have no state yet, and parts of the state that have none of
        the tensors with these ``names``."""
        without = set(self._state).difference(name.partition("/")[0] for name in names)
        optimizers = [join(path) for path, found in self._find_all(torch.optim.Optimizer) if not found.state]
        return [*optimizers, *map(segment, without)]

    def reshaping(self) -> list[str]:
        """Names of the objects that take over the states of another number of ranks."""
        return [join(path) for path, found in self._find_all(cast("type[object]", Reshapes)) if keeps_state(found)]

    def _can_take(self, name: str) -> bool:
        """Whether another value can come to stand under the name, or the one that is there be changed."""
        value = self._state[name]
        return (
            isinstance(self._state, MutableMapping)
            or isinstance(value, torch.Tensor | torch.Generator | dict | list)
            or self._source(value, (segment(name),)) is not None
        )

    def _plan_parts(self, builds: dict[str, Build], restoring: Restoring) -> None:
        """Values at the top are set in the caller's own mapping, where it can be written to."""

        def put(value: object) -> None:
            for name, item in cast("dict[str, object]", value).items():
                if isinstance(self._state, MutableMapping) and self._state[name] is not item:
                    self._state[name] = item

        restoring.build(lambda: {name: build() for name, build in builds.items()}, put)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
