"""What a preflight finds, as plain records: ranks send them to each other, and ``--json`` prints them."""

from __future__ import annotations

from typing import Literal

import msgspec

from ckptd.storage import Finding, Level

HOST = "host"

Outcome = Literal["well", "failed", "absent"]
"""Of a meeting; ``absent``: the other did not come."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried on one rank."""

    level: Level
    subject: str
    message: str
    hint: str = ""
    place: str = HOST
    """The host, or one of its GPUs."""
    figures: dict[str, float] = {}
    """What was measured; the unit is the last word of the name."""
    shared: bool = False
    """It concerns what nodes share, such as a store: where it fails for all, no node is to blame."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks that were to send to each other, as one of them saw it; merged, as both did."""

    ranks: tuple[int, int]
    """The lower first."""
    outcome: Outcome
    bytes_per_second: float = 0.0
    skew_seconds: float = 0.0
    """The clock of the higher rank less that of the lower."""
    error: str = ""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has found."""

    rank: int
    node: str
    checks: tuple[Check, ...] = ()
    pairs: tuple[Pair, ...] = ()


class BadNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is better left out, by those of its ranks that showed it."""

    node: str
    """Empty: none of its ranks ever said its name."""
    ranks: tuple[int, ...]
    reasons: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole preflight, the same on all ranks."""

    world: int
    exit_code: int
    bad_nodes: tuple[BadNode, ...]
    faults: tuple[str, ...]
    """What is wrong with no node, or with all alike."""
    warnings: tuple[str, ...]
    members: tuple[Member, ...]
    """Those ranks that answered to the end."""
    pairs: tuple[Pair, ...]


def check_of(finding: Finding, *, shared: bool = False) -> Check:
    """A finding as a check of this host."""
    return Check(
        level=finding.level, subject=finding.subject, message=finding.message, hint=finding.hint, shared=shared
    )
