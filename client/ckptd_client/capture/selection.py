"""Which values of a checkpoint a restore takes, and which it may cast."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate


def patterns(found: Iterable[str]) -> re.Pattern[str]:
    """What matches the names that any of these shell-like patterns stands for: ``*`` is any text, a ``/`` in it too,
    and a pattern stands for everything below what it matches."""
    texts = [text for pattern in found for text in (translate(pattern), translate(pattern.rstrip("/") + "/*"))]
    return re.compile("|".join(texts) if texts else r"(?!)")


class Selection:
    """Names such as ``model/layers.0.weight``, by what is to be in it and what is not."""

    def __init__(self, include: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> None:
        """``include``: ``None`` for everything."""
        self._include = None if include is None else patterns(include)
        self._exclude = patterns(exclude)
        self.everything = include is None and not tuple(exclude)

    def takes(self, name: str) -> bool:
        if self.everything:
            return True
        return (self._include is None or self._include.match(name) is not None) and not self._exclude.match(name)


EVERYTHING = Selection()
NOTHING = Selection(())
