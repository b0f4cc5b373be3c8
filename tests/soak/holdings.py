"""What processes hold over time, and whether it stays flat."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Holding:
    """Of one process at one moment, or of several together."""

    private_bytes: int = 0
    """Anonymous memory that is resident, so pages that a fork shares count for both."""
    shared_bytes: int = 0
    """Resident pages of arenas and other shared memory."""
    descriptors: int = 0
    threads: int = 0

    def __str__(self) -> str:
        return (
            f"{self.private_bytes / 2**20:.1f} MiB private, {self.shared_bytes / 2**20:.1f} MiB shared, "
            f"{self.descriptors} descriptors, {self.threads} threads"
        )


def holding_of(pid: int) -> Holding:
    """What a process holds now. Raises :class:`OSError` where it has ended."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return Holding(
        private_bytes=int(status["RssAnon"].split()[0]) << 10,
        shared_bytes=int(status["RssShmem"].split()[0]) << 10,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


def together(holdings: Iterable[Holding]) -> Holding:
    """Their sum."""
    return Holding(*map(sum, zip(*map(astuple, holdings), strict=True)))


@dataclass
class Course:
    """Holdings in order of time, at equal distances."""

    holdings: list[Holding] = field(default_factory=list[Holding])

    def before_and_after(self) -> tuple[Holding, Holding]:
        """The medians of the second and of the last quarter: the first is the time in which caches and pools fill."""
        quarter = len(self.holdings) // 4
        return _middle(self.holdings[quarter : 2 * quarter]), _middle(self.holdings[-quarter:])

    def peak(self) -> Holding:
        """The most of each, whenever that was."""
        return Holding(*map(max, zip(*map(astuple, self.holdings), strict=True)))


def _middle(holdings: list[Holding]) -> Holding:
    return Holding(**{each.name: int(median(getattr(one, each.name) for one in holdings)) for each in fields(Holding)})
