"""Where a stream is: plain numbers that go into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast

from ckptd.errors import MismatchError


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where one source is."""

    passes: int = 0
    """Passes over the source that were begun before this one."""
    shard: int = 0
    """Which shard of the pass, in the order of the pass."""
    record: int = 0
    """Records of the shard that were given."""
    offset: int = 0
    """Tokens of the next record that were given, where records are packed."""
    records: int = 0
    """Records given in all."""
    tokens: int = 0
    """Tokens given in all, where records are packed."""
    out: bool = False
    """Whether it has ended and the others go on without it."""


@dataclass(frozen=True, slots=True)
class OrderPosition:
    """Where one order over all sources is."""

    epoch: int = 0
    """The pass that sources may be in, where they do not repeat."""
    place: int = 0
    """Samples given in all."""
    sources: Mapping[str, SourcePosition] = field(default_factory=dict[str, SourcePosition])

    def joined_by(self, names: Iterable[str]) -> OrderPosition:
        """With sources that were not read so far: they begin now, and owe no passes."""
        new = {name: SourcePosition(passes=self.epoch) for name in names if name not in self.sources}
        return replace(self, sources={**self.sources, **new} if self.place else self.sources)

    def next_epoch(self) -> OrderPosition:
        """Where the order goes on after its end: with what remained, then with another pass of what had ended."""
        sources = {name: replace(source, out=False) for name, source in self.sources.items()}
        epoch = max([self.epoch, *(source.passes for source in sources.values())])  # they may have repeated before
        return OrderPosition(epoch + 1, self.place, sources)

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "epoch": self.epoch,
            "place": self.place,
            "sources": {name: asdict(source) for name, source in self.sources.items()},
        }


def from_state(state: object) -> OrderPosition:
    """The inverse of :meth:`OrderPosition.to_state`. Raises :class:`MismatchError` for anything else."""
    try:
        found = cast("dict[str, Any]", state)
        sources = {name: _source(saved) for name, saved in found["sources"].items()}
        return OrderPosition(_count(found["epoch"]), _count(found["place"]), sources)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise MismatchError(f"the stream's state has no position that can be read: {error!r}") from error


def _source(saved: Mapping[str, Any]) -> SourcePosition:
    numbers = {item.name: _count(saved[item.name]) for item in fields(SourcePosition) if item.name != "out"}
    return SourcePosition(**numbers, out=bool(saved["out"]))


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
