"""What is to be kept of a run, and the plan that follows from it: pure, so that it can be shown before it is done."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ckptd.checkpoint.selectors import parse_selector, spoken
from ckptd.checkpoint.standing import UNMARKED, Standing
from ckptd.errors import ConfigError
from ckptd.format.keys import Version
from ckptd.limits import BESIDE_SECONDS


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to keep of the committed checkpoints of a run. Rules add up: what any of them keeps, stays.

    A checkpoint is *good* unless it is marked suspect or unhealthy. Whatever the rules say, the newest checkpoint
    stays, and the newest that were verified, and one that is good where there is any.
    """

    last: int = 5
    """The newest so many; and where some of them are not good, the newest so many good ones as well."""
    every_steps: int | None = None
    """The first good one at or after each multiple, for good."""
    every: float | None = None
    """A good one for each so many seconds, for good."""
    best: tuple[str, Literal["min", "max"], int] | None = None
    """Metric, direction and number, as in ``("loss", "min", 3)``: the best good ones by what the training reported. One
    whose metric is missing or not finite is never among them."""
    pins: tuple[int | str, ...] = ()
    """These, as ``1000`` or ``"1000-g3"``, beside those that are pinned by a mark."""
    verified: int = 1
    """The newest so many good ones that were verified."""
    beside_seconds: float = BESIDE_SECONDS
    """What is no longer on the line, as the training went on from an older checkpoint, stays for so long."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.verified < 1:
            raise ConfigError(
                f"Keep(last={self.last}, verified={self.verified})", hint="keep at least one checkpoint of each"
            )
        if (self.every_steps is not None and self.every_steps < 1) or (self.every is not None and not self.every > 0):
            raise ConfigError(f"Keep(every_steps={self.every_steps}, every={self.every})", hint="give positive numbers")
        if not self.beside_seconds >= 0:
            raise ConfigError(f"Keep(beside_seconds={self.beside_seconds})", hint="give zero or more")
        if self.best is not None and (
            len(self.best) != 3
            or not isinstance(self.best[0], str)  # pyright: ignore[reportUnnecessaryIsInstance]
            or self.best[1] not in ("min", "max")
            or self.best[2] < 1
        ):
            raise ConfigError(f"Keep(best={self.best!r})", hint='give metric, direction, number: ("loss", "min", 3)')
        msgspec.structs.force_setattr(self, "pins", tuple(self.pins))
        for pin in self.pins:
            if parse_selector(pin)[0] is None:
                raise ConfigError(f"Keep(pins={self.pins!r})", hint="pin steps, not what is latest at the time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is stored, as far as the plan goes by it."""

    line: Sequence[Version]
    """Newest first."""
    beside: Mapping[Version, float] = field(default_factory=dict[Version, float])
    """Committed, and not on the line; for how many seconds not."""
    standings: Mapping[Version, Standing] = field(default_factory=dict[Version, Standing])
    """Of those that have marks."""
    committed_seconds: Mapping[Version, float] = field(default_factory=dict[Version, float])
    """When each was committed, by the store's clock."""
    metrics: Mapping[Version, Mapping[str, float | None]] = field(
        default_factory=dict[Version, Mapping[str, float | None]]
    )
    references: Mapping[Version, Collection[Version]] = field(default_factory=dict[Version, Collection[Version]])
    """Checkpoint → the older ones whose bytes it needs."""
    held: Mapping[Version, str] = field(default_factory=dict[Version, str])
    """What somebody else still needs, and for what."""

    def standing(self, version: Version) -> Standing:
        """Of one checkpoint."""
        return self.standings.get(version, UNMARKED)


@dataclass(frozen=True, slots=True)
class Plan:
    """A verdict on every committed checkpoint, each with its reason."""

    keep: dict[Version, str]
    delete: dict[Version, str]


def plan(keep: Keep, facts: Facts) -> Plan:
    """The verdict: everything that is committed is in one of its two halves."""
    kept: dict[Version, str] = {}
    for version, reason in _kept(keep, facts):
        kept.setdefault(version, reason)
    _add_referenced(kept, facts.references)
    everything = [*facts.line, *facts.beside]
    number = {version: i for i, version in enumerate(facts.line)}
    delete = {
        version: f"{number[version]} newer ones are committed, and no rule keeps it"
        if version in number
        else f"off the line for {facts.beside[version]:.0f} s"
        for version in everything
        if version not in kept
    }
    return Plan({version: kept[version] for version in everything if version in kept}, delete)


def _kept(keep: Keep, facts: Facts) -> Iterator[tuple[Version, str]]:
    good = [version for version in facts.line if facts.standing(version).good]
    yield from _each(facts.line[: keep.last], f"one of the last {keep.last}")
    yield from _each(good[: keep.last], f"one of the last {keep.last} that are good")
    verified = [version for version in good if facts.standing(version).verified]
    yield from _each(verified[:1], "the newest that was verified")
    yield from _each(verified[: keep.verified], f"one of the {keep.verified} newest that were verified")
    yield from _pinned(keep, facts)
    yield from _best(keep, good, facts)
    yield from _at_intervals(keep, good[::-1], facts)
    yield from facts.held.items()
    yield from _beside(keep, facts, bool(good), bool(verified))


def _each(versions: Sequence[Version], reason: str) -> Iterator[tuple[Version, str]]:
    for version in versions:
        yield version, reason


def _pinned(keep: Keep, facts: Facts) -> Iterator[tuple[Version, str]]:
    pins = [parse_selector(pin) for pin in keep.pins]
    for version in (*facts.line, *facts.beside):
        asked = any(version.step == step and generation in (None, version.generation) for step, generation in pins)
        if asked or facts.standing(version).pinned:
            yield version, "pinned"


def _best(keep: Keep, good: Sequence[Version], facts: Facts) -> Iterator[tuple[Version, str]]:
    if keep.best is None:
        return
    metric, direction, count = keep.best
    sign = 1 if direction == "min" else -1
    found: list[tuple[float, Version]] = []
    for version in good:
        value = facts.metrics.get(version, {}).get(metric)
        if value is not None and math.isfinite(value):
            found.append((sign * value, version))
    found.sort(key=lambda one: one[0])  # stable: of equal ones the newer
    for value, version in found[:count]:
        yield version, f"one of the {count} best by {metric}: {sign * value:.6g}"


def _at_intervals(keep: Keep, oldest_first: Sequence[Version], facts: Facts) -> Iterator[tuple[Version, str]]:
    """What one rule has chosen it chooses again, whatever else was deleted or has come meanwhile."""
    reached = -1
    since_seconds = -math.inf
    for version in oldest_first:
        if keep.every_steps is not None and version.step // keep.every_steps > reached:
            reached = version.step // keep.every_steps
            yield version, f"the first from step {reached * keep.every_steps} on"
        at_seconds = facts.committed_seconds.get(version)
        if keep.every is not None and at_seconds is not None and at_seconds >= since_seconds + keep.every:
            since_seconds = at_seconds
            yield version, f"one for each {keep.every:g} s"


def _beside(keep: Keep, facts: Facts, any_good: bool, any_verified: bool) -> Iterator[tuple[Version, str]]:
    for version, seconds in facts.beside.items():
        if seconds <= keep.beside_seconds:
            yield version, f"off the line, for less than {keep.beside_seconds:g} s"
    newest_first = sorted(facts.beside, key=lambda version: (version.generation, version.step), reverse=True)
    good = [version for version in newest_first if facts.standing(version).good]
    verified = [version for version in good if facts.standing(version).verified]
    if not any_verified:
        yield from _each(verified[:1], "off the line, and the newest that was verified")
    if not any_good:
        yield from _each(good[:1], "off the line, and the newest that is good")


def _add_referenced(kept: dict[Version, str], references: Mapping[Version, Collection[Version]]) -> None:
    todo = list(kept)
    while todo:
        user = todo.pop()
        for version in references.get(user, ()):
            if version not in kept:
                kept[version] = f"{spoken(user)} needs bytes of it"
                todo.append(version)
