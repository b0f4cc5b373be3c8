"""Which values of a checkpoint a restore takes, and which it may cast."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import translate

from ckptd.errors import ConfigError, near


def patterns(found: Iterable[str]) -> re.Pattern[str]:
    """What matches the names that any of these shell-like patterns stands for: ``*`` is any text, a ``/`` in it too,
    and a pattern stands for everything below what it matches."""
    texts = [text for pattern in found for text in (translate(pattern), translate(pattern.rstrip("/") + "/*"))]
    return re.compile("|".join(texts) if texts else r"(?!)")


class Selection:
    """Names such as ``model/layers.0.weight``, by what is to be in it and what is not."""

    def __init__(self, include: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> None:
        """``include``: ``None`` for everything."""
        left_out = tuple(exclude)
        self.everything = include is None and not left_out
        self.patterns = (*(() if include is None else (include := tuple(include))), *left_out)
        """All that was given."""
        self._include = None if include is None else patterns(include)
        self._exclude = patterns(left_out)

    def takes(self, name: str) -> bool:
        if self.everything:
            return True
        return (self._include is None or self._include.match(name) is not None) and not self._exclude.match(name)


def unmatched(given: Iterable[str], names: Collection[str]) -> dict[str, list[str]]:
    """Those of the patterns that stand for none of the names, and what may have been meant by each."""
    found = [pattern for pattern in given if not any(map(patterns([pattern]).match, names))]
    return {pattern: near(pattern.rstrip("*").rstrip("/"), _and_above(names)) for pattern in found}


def refuse_unmatched(found: Mapping[str, Sequence[str]], option: str = "include, exclude or cast") -> None:
    """Raise :class:`ConfigError` for patterns that stand for nothing, if there are any."""
    if not found:
        return
    meant = list(dict.fromkeys(name for names in found.values() for name in names))
    raise ConfigError(
        f"{option}: nothing is called {', '.join(map(repr, found))}",
        hint=f"near is {', '.join(meant)}" if meant else "patterns stand for names such as model/layers.0.weight",
    )


def _and_above(names: Iterable[str]) -> list[str]:
    """The names, and those of what they lie in."""
    found: dict[str, None] = {}
    for name in names:
        segments = name.split("/")
        found.update(dict.fromkeys("/".join(segments[:i]) for i in range(1, len(segments) + 1)))
    return list(found)


EVERYTHING = Selection()
NOTHING = Selection(())
