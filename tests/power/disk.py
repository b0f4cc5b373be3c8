"""A disk that can lose power: what processes see, and what is sure to be there afterwards.

Worse than any one file system. Bytes are durable after ``fsync`` of their file only, names after ``fsync`` of their
folder only. What was not synced is lost or kept by the toss of a coin, change by change and sector by sector, in any
order: a later change may survive an earlier one. Only one rename is one change, and a sector is never torn.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

SECTOR_BYTES = 512
"""What a drive writes whole or not at all."""


class Process(Protocol):
    """What makes calls."""

    stopped: bool


@dataclass(eq=False)
class File:
    """``written``: ranges that are not synced."""

    number: int
    modified_seconds: float
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    written: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    names: int = 0
    locked: tuple[Process, int] | None = None
    """By whom, and with which descriptor; a lock ends with its process."""

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.written.clear()

    def survivor(self, coin: Coin) -> bytes:
        """What may be found after the power has gone."""
        if not self.written and len(self.durable) == len(self.live):
            return self.durable
        kept = bytearray(self.durable.ljust(len(self.live), b"\0"))
        for start, stop in self.written:
            for at in range(start - start % SECTOR_BYTES, stop, SECTOR_BYTES):
                if coin.survives():
                    first, last = max(at, start), min(at + SECTOR_BYTES, stop)
                    kept[first:last] = self.live[first:last]
        shortest = min(len(self.durable), len(self.live))
        return bytes(kept[: coin.between(shortest, len(self.live))])


@dataclass(eq=False)
class Folder:
    """``pending``: changes that are not synced, oldest first; each of them happens whole or not at all."""

    number: int
    modified_seconds: float
    live: dict[str, File | Folder] = field(default_factory=dict[str, "File | Folder"])
    durable: dict[str, File | Folder] = field(default_factory=dict[str, "File | Folder"])
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list[dict[str, "File | Folder | None"]])

    def change(self, names: dict[str, File | Folder | None]) -> None:
        _apply(self.live, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.pending.clear()

    def survivors(self, coin: Coin) -> Mapping[str, File | Folder]:
        if not self.pending:
            return self.durable
        found = dict(self.durable)
        for names in self.pending:
            if coin.survives():
                _apply(found, names)
        return found


def _apply(entries: dict[str, File | Folder], names: dict[str, File | Folder | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Coin:
    """What becomes of that which was not synced. ``chance`` 0: all of it is lost; 1: nothing."""

    def __init__(self, source: random.Random, chance: float) -> None:
        self._source = source
        self._chance = chance

    def survives(self) -> bool:
        return self._source.random() < self._chance

    def between(self, shortest: int, longest: int) -> int:
        """A size of a file."""
        if self._chance in (0, 1) or self._source.random() < 0.5:
            return longest if self.survives() else shortest
        return self._source.randint(shortest, longest)


class Disk:
    """``changed`` is called after each change with its name, and nothing else goes on meanwhile."""

    def __init__(self, root: str, changed: Callable[[str], None] = lambda _: None) -> None:
        """``root``: a durable folder that is there from the beginning, all there is of the file system."""
        self.root = root
        self.changed = changed
        self.changes = 0
        self._clock = 0.0
        self._numbers = 0
        self.top = Folder(self.next_number(), 0.0)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def tick(self) -> float:
        """Now, in seconds. Every look at the clock takes a while."""
        self._clock += 0.001
        return self._clock

    def did_change(self, what: str) -> None:
        self.changes += 1
        self.changed(what)

    def find(self, path: str) -> File | Folder:
        """Raises :class:`OSError` as a file system would."""
        if path == self.root:
            return self.top
        if not path.startswith(self.root + "/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        node: File | Folder = self.top
        for name in path.removeprefix(self.root + "/").split("/"):
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if name not in node.live:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = node.live[name]
        return node

    def folder(self, path: str) -> Folder:
        node = self.find(path)
        if isinstance(node, File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def left(self, source: random.Random, chance: float) -> dict[str, bytes]:
        """Path below the root → bytes, of what is found when the power is back."""
        coin = Coin(source, chance)
        data: dict[int, bytes] = {}

        def walk(folder: Folder, above: str) -> Iterator[tuple[str, bytes]]:
            for name, node in folder.survivors(coin).items():
                if isinstance(node, Folder):
                    yield from walk(node, f"{above}{name}/")
                    continue
                if node.number not in data:
                    data[node.number] = node.survivor(coin)
                yield above + name, data[node.number]

        return dict(walk(self.top, ""))

    def without_power(self, source: random.Random, chance: float) -> Disk:
        """The disk that is found when the power is back; this one stays as it is."""
        found = Disk(self.root)
        found._clock, found._numbers = self._clock, self._numbers
        coin = Coin(source, chance)
        copies: dict[int, File] = {}

        def copy(folder: Folder) -> Folder:
            kept = Folder(folder.number, folder.modified_seconds)
            for name, node in folder.survivors(coin).items():
                if isinstance(node, Folder):
                    kept.live[name] = copy(node)
                    continue
                if node.number not in copies:
                    data = node.survivor(coin)
                    copies[node.number] = File(node.number, node.modified_seconds, bytearray(data), data)
                kept.live[name] = copies[node.number]
                copies[node.number].names += 1
            kept.durable = dict(kept.live)
            return kept

        found.top = copy(self.top)
        return found

    def files(self) -> dict[str, bytes]:
        """Path below the root → bytes, of all that is seen."""

        def walk(folder: Folder, above: str) -> Iterator[tuple[str, bytes]]:
            for name, node in folder.live.items():
                if isinstance(node, Folder):
                    yield from walk(node, f"{above}{name}/")
                else:
                    yield above + name, bytes(node.live)

        return dict(walk(self.top, ""))
