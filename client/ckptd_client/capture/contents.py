"""What a checkpoint holds: parts of stored tensors, read all at once, and the values that tensors are part of."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from ckptd.checkpoint.regions import region
from ckptd.errors import CkptdError, FormatError, MismatchError, StateError, UsageError, first_line
from ckptd.format.records import Box, Span
from ckptd.format.tree import decode_json
from ckptd_client.capture.codecs import (
    PerRank,
    SavedArray,
    SavedGenerator,
    SavedObject,
    SavedTensor,
    decode_value,
    registered,
)
from ckptd_client.capture.stored import Described, Stored, Wanted

CPU = torch.device("cpu")


class Contents:
    """One checkpoint in one restore. First everything that is needed is wanted; then it is fetched, in one go; then
    values are made of it."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.ranks = stored.ranks
        self.aliases: Mapping[str, str] = stored.aliases
        self._all_own = stored.ranks.same  # whether all that there is was this rank's
        self._found: dict[str, Described | None] = {}
        self._wanted: dict[tuple[str, Box | Span | None], Wanted] = {}
        self._read: dict[Wanted, torch.Tensor] | None = None
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}

    # What there is

    def find(self, name: str) -> Described | None:
        """The stored tensor behind a name, ties followed."""
        name = self.aliases.get(name, name)
        if name not in self._found:
            self._found[name] = self._stored.describe(name)
        return self._found[name]

    def entry(self, saved: SavedTensor) -> Described:
        """Raises :class:`FormatError` where there is none."""
        found = self.find(saved.name)
        if found is None:
            raise FormatError(f"{saved.name}: the state tree names a tensor that the layout does not have")
        return found

    def widen(self) -> dict[str, object]:
        """What the ranks that saved have in common, for a rank that has something which it did not save: decoded, with
        this rank's own in it wherever it had any."""
        tree, aliases = self._stored.in_common()
        self._all_own = False
        self.aliases = {**aliases, **self.aliases}
        return cast("dict[str, object]", _overlaid(decode_tree(self._stored.tree), decode_tree(tree)))

    def _and_now(self) -> str:
        return "and this one had none" if self.ranks.same else f"and there are {self.ranks.world} now"

    def missing_here(self, saved: object) -> str | None:
        """Why a value cannot be made on this rank: some of it was each rank's own. ``None`` where it can."""
        if self._all_own:
            return None
        for leaf in _leaves(saved):
            if isinstance(leaf, PerRank) or (isinstance(leaf, SavedTensor) and self.find(leaf.name) is None):
                return f"each of {self.ranks.saved_world} ranks had its own value, {self._and_now()}"
        return None

    def of_each_rank(self, part: str) -> list[Any] | None:
        """What each of the ranks that saved had in the place of an object, as plain values; see
        :meth:`Stored.of_each_rank`. Raises :class:`MismatchError` where there are tensors in it, which stay theirs."""
        nodes = self._stored.of_each_rank(part)
        values = None if nodes is None else [decode_value(node) for node in nodes]
        if any(isinstance(leaf, SavedTensor) for leaf in _leaves(values)):
            raise MismatchError(f"{part}: its state has tensors, which another number of ranks cannot take over")
        return values

    # Wanting and reading

    def want(self, saved: SavedTensor, part: Box | Span | None = None) -> Wanted:
        """Have a part of a tensor read, or all of it."""
        if self._read is not None:
            raise UsageError(f"{saved.name} is wanted after everything was read")
        entry = self.entry(saved)
        key = entry.name, part
        wanted = self._wanted.get(key)
        if wanted is None:
            wanted = self._wanted[key] = Wanted(entry, region(entry.shape, part))
        return wanted

    def want_all(self, saved: object) -> None:
        """Have every tensor of a value read, whole."""
        for leaf in _leaves(saved):
            if isinstance(leaf, SavedTensor):
                self.want(leaf)

    def fetch(self) -> None:
        """Read and verify all that is wanted. Raises what reading raises."""
        wanted = list(self._wanted.values())
        self._read = dict(zip(wanted, self._stored.fetch(wanted), strict=True))

    def let_go(self) -> None:
        """Of all that was read."""
        self._found.clear()
        self._wanted.clear()
        self._made.clear()
        self._read = {}

    def read(self, wanted: Wanted) -> torch.Tensor:
        """The elements of a part, flat, not to be written to."""
        if self._read is None:
            raise UsageError(f"{wanted.tensor.name} was not read yet")
        return self._read[wanted]

    def whole(self, saved: SavedTensor) -> torch.Tensor:
        """A tensor that is wanted whole, in its shape, not to be written to."""
        entry = self.entry(saved)
        return self.read(self._wanted[entry.name, None]).view(entry.shape)

    # Values

    def value(self, saved: object, device: torch.device = CPU, like: object = None) -> object:
        """A saved value with everything that belongs to it, in memory of its own.

        Tensors go to where ``like`` has a tensor in the same place, else to ``device``. Tied ones stay tied. Raises
        :class:`FormatError` or :class:`StateError` for what cannot be made here.
        """
        match saved:
            case SavedTensor():
                return self._tensor(saved, like.device if isinstance(like, torch.Tensor) else device)
            case SavedArray(tensor, dtype):
                return self.whole(tensor).numpy().astype(dtype, copy=True)
            case SavedGenerator(place, state):
                return _generator(place, state)
            case SavedObject(codec, value):
                return _decoded(codec, self.value(value, device))
            case dict():
                return self._mapping(cast("dict[Any, object]", saved), device, like)
            case list() | tuple() | set() | frozenset() | deque():
                return self._sequence(cast("list[object]", saved), device, like)
            case _:
                return saved

    def _mapping(self, saved: dict[Any, object], device: torch.device, like: object) -> object:
        places = cast("dict[Any, object]", like) if isinstance(like, dict) else {}
        items = {key: self.value(item, device, places.get(key)) for key, item in saved.items()}
        made: dict[Any, Any] = Counter() if isinstance(saved, Counter) else OrderedDict()
        made.update(items)
        return made if type(saved) in (Counter, OrderedDict) else items

    def _sequence(self, saved: Iterable[object], device: torch.device, like: object) -> object:
        if isinstance(saved, torch.Size):
            return saved
        places = list(cast("list[object]", like)) if isinstance(like, list | tuple) else []
        items = [self.value(item, device, places[i] if i < len(places) else None) for i, item in enumerate(saved)]
        if isinstance(saved, deque):
            return deque(items, saved.maxlen)
        return cast("type[list[object]]", type(saved))(items)

    def _tensor(self, saved: SavedTensor, device: torch.device) -> torch.Tensor:
        name = self.entry(saved).name
        if (name, device) not in self._made:
            self._made[name, device] = self.whole(saved).to(device, copy=True)
        return self._made[name, device]


def decode_tree(tree: bytes) -> dict[str, object]:
    """The parts of a state tree, tensors by reference. Raises :class:`FormatError`."""
    try:
        saved = decode_value(decode_json(tree))
    except RecursionError:
        raise FormatError("state tree nested too deep") from None
    if not isinstance(saved, dict) or not all(isinstance(name, str) for name in cast("dict[object, object]", saved)):
        raise FormatError("the state tree is not a dict of parts")
    return cast("dict[str, object]", saved)


def _overlaid(own: object, common: object) -> object:
    """What is in ``own``, and in its dicts what only ``common`` has."""
    if not isinstance(own, dict):
        return own
    mine, others = cast("dict[Any, object]", own), cast("dict[Any, object]", common)
    if type(others) is not type(mine):
        return mine
    made = type(mine)()
    for key, value in mine.items():
        made[key] = _overlaid(value, others.get(key))
    for key, value in others.items():
        if key not in mine:
            made[key] = value
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat."""
    return tensor.reshape(-1).view(torch.uint8)


def _leaves(saved: object) -> Iterator[object]:
    """Tensors, and what was each rank's own, anywhere in a value."""
    match saved:
        case SavedTensor() | PerRank():
            yield saved
        case SavedArray(tensor, _):
            yield tensor
        case SavedObject(_, value):
            yield from _leaves(value)
        case dict():
            for item in cast("dict[Any, object]", saved).values():
                yield from _leaves(item)
        case list() | tuple() | set() | frozenset() | deque():
            for item in cast("list[object]", saved):
                yield from _leaves(item)
        case _:
            return


def _generator(place: str, state: bytes) -> torch.Generator:
    try:
        generator = torch.Generator(place)
        return generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except RuntimeError as error:
        raise StateError(f"a generator on {place} cannot be made here: {first_line(error)}") from error


def _decoded(codec: str, value: object) -> object:
    try:
        return registered(codec).decode(value)
    except CkptdError:
        raise
    except Exception as error:
        raise StateError(f"codec {codec!r} does not take what was saved: {first_line(error)}") from error
