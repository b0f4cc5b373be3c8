"""How people name a checkpoint: ``latest``, a step, or a step and its generation as in ``1000-g3``."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.errors import NoCheckpoint, UsageError
from ckptd.format.keys import Version

Selector = int | str

NAMED_MAX = 8
"""So many checkpoints, or runs, are named in an error."""


def spoken(version: Version) -> str:
    """A checkpoint as people write it."""
    return f"{version.step}-g{version.generation}"


def named(versions: Sequence[Version]) -> str:
    """Some checkpoints in an error, newest first."""
    newest = sorted(versions, key=lambda version: (version.generation, version.step), reverse=True)
    more = f" and {len(newest) - NAMED_MAX} more" if len(newest) > NAMED_MAX else ""
    return ", ".join(spoken(version) for version in newest[:NAMED_MAX]) + more


def parse_selector(selector: Selector) -> tuple[int | None, int | None]:
    """Step and generation; no step for ``latest``. Raises :class:`UsageError`."""
    if selector == "latest":
        return None, None
    step, separator, generation = str(selector).partition("-g")
    if step.isdecimal() and (generation.isdecimal() or not separator):
        return int(step), int(generation) if separator else None
    raise UsageError(
        f"not a checkpoint: {selector!r}", hint="give latest, a step such as 1000, or step and generation as 1000-g3"
    )


def choose(selector: Selector, line: Sequence[Version], committed: Sequence[Version]) -> Version:
    """The checkpoint that is meant: on the line (newest first) if it is there, else the only other one that fits.

    Raises :class:`NoCheckpoint`, naming what exists, and :class:`UsageError` for what is no selector.
    """
    step, generation = parse_selector(selector)
    if step is None and line:
        return line[0]

    def fits(version: Version) -> bool:
        return version.step == step and generation in (None, version.generation)

    on_line = next(filter(fits, line), None)
    if on_line is not None:
        return on_line
    beside = list(filter(fits, committed))
    if len(beside) == 1:
        return beside[0]
    if beside:
        raise NoCheckpoint(
            f"step {step} is not on the line of the run, and lies beside it more than once",
            hint=f"name one of {named(beside)}",
        )
    raise NoCheckpoint(
        "there is no checkpoint" if step is None else f"there is no checkpoint {selector}",
        hint=f"there are {named(line or committed)}" if committed else "",
    )
