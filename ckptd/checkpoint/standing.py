"""What the marks of a checkpoint add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.storage import ObjectInfo

_SOUNDNESS = ("verified", "suspect", "revoked")
_HEALTH = ("unhealthy", "revoked")
_PINS = ("pinned", "unpinned")


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a checkpoint can be relied on. One without marks is good, as far as anybody knows."""

    verified: bool = False
    """It was read again, all of it, or restored."""
    suspect: bool = False
    """It did not verify, or could not be loaded."""
    unhealthy: bool = False
    """What was saved is of no use: values that are not finite, say. It may well verify."""
    pinned: bool = False
    debug: bool = False
    """It was saved for a post-mortem."""

    @property
    def good(self) -> bool:
        """Nothing speaks against going on from it."""
        return not self.suspect and not self.unhealthy and not self.debug

    @property
    def against(self) -> str:
        """The word for what speaks against it; empty where it is good."""
        return next((word for word in ("unhealthy", "suspect", "debug") if getattr(self, word)), "")

    @property
    def words(self) -> tuple[str, ...]:
        """For people."""
        return tuple(word for word in ("verified", "suspect", "unhealthy", "pinned", "debug") if getattr(self, word))


UNMARKED = Standing()


def standing(kinds: Sequence[str]) -> Standing:
    """``kinds``: of all marks, in their order. Whether it verified and whether it is healthy are two questions; the
    latest mark on each holds, and ``revoked`` takes back the answers to both."""
    soundness = _latest(kinds, _SOUNDNESS)
    return Standing(
        verified=soundness == "verified",
        suspect=soundness == "suspect",
        unhealthy=_latest(kinds, _HEALTH) == "unhealthy",
        pinned=_latest(kinds, _PINS) == "pinned",
        debug="debug" in kinds,
    )


def mark_order(info: ObjectInfo) -> tuple[float, bool, str]:
    """Marks in this order are oldest first, by the store's clock. Of two that it cannot tell apart, the one that says
    ``suspect`` is the later."""
    return info.modified_seconds, kind_of_mark(info.key) == "suspect", info.key


def kind_of_mark(key: str) -> str:
    """What a mark says, by its key."""
    return key.rpartition("/")[2].split("-", 1)[0]


def _latest(kinds: Sequence[str], among: Sequence[str]) -> str | None:
    return next((kind for kind in reversed(kinds) if kind in among), None)
