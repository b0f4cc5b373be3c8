"""What a checkpoint holds: stored tensors by name, and the values that they are part of."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from ckptd.errors import CkptdError, FormatError, StateError, first_line
from ckptd.format.records import Layout, TensorEntry
from ckptd_client.capture.codecs import SavedArray, SavedGenerator, SavedObject, SavedTensor, registered

Read = Callable[[str], torch.Tensor]
"""The verified bytes of a stored tensor, on the CPU, with its saved dtype and shape; valid until the apply is over."""

CPU = torch.device("cpu")


class Contents:
    """One checkpoint, as one rank reads it."""

    def __init__(self, layout: Layout, read: Read) -> None:
        self._read = read
        self._entries: dict[str, TensorEntry] = {entry.name: entry for entry in layout.tensors}
        self.aliases = layout.aliases
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}

    def entry(self, saved: SavedTensor) -> TensorEntry:
        """The stored tensor behind a name, ties resolved. Raises :class:`FormatError` where there is none."""
        try:
            return self._entries[self.aliases.get(saved.name, saved.name)]
        except KeyError:
            raise FormatError(f"{saved.name}: the state tree names a tensor that the layout does not have") from None

    def read(self, saved: SavedTensor) -> torch.Tensor:
        """Its bytes, not to be written to."""
        return self._read(self.entry(saved).name)

    def differ(self, one: str, other: str) -> bool:
        """Whether two names, both of this checkpoint, stand for different values."""
        a, b = self.entry(SavedTensor(one)), self.entry(SavedTensor(other))
        if a is b:
            return False
        same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
        return not (same_kind and torch.equal(_bits(self._read(a.name)), _bits(self._read(b.name))))

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return self.aliases.get(name, name) in self._entries

    def value(self, saved: object, device: torch.device = CPU, like: object = None) -> object:
        """A saved value with everything that belongs to it, in memory of its own.

        Tensors go to where ``like`` has a tensor in the same place, else to ``device``. Tied ones stay tied. Raises
        :class:`FormatError` or :class:`StateError` for what cannot be made here.
        """
        match saved:
            case SavedTensor():
                return self._tensor(saved, like.device if isinstance(like, torch.Tensor) else device)
            case SavedArray(tensor, dtype):
                return self.read(tensor).numpy().astype(dtype, copy=True)
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
            self._made[name, device] = self._read(name).to(device, copy=True)
        return self._made[name, device]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


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
