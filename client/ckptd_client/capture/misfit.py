"""What is said where a checkpoint and the live state do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.errors import MismatchError

NAMES_SHOWN = 8
"""How many names an error lists of each kind."""


def misfit(
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatches: Sequence[tuple[str, str]],
    other_dtypes: Sequence[str] = (),
) -> MismatchError:
    """The error for what is on one side only, and for names and reasons of what does not fit; ``other_dtypes``: those
    of them that would fit if they were cast."""
    kinds = {
        "missing from the checkpoint": missing,
        "unexpected in the checkpoint": unexpected,
        "does not fit": [f"{name} ({reason})" for name, reason in mismatches],
    }
    problems = [f"{kind}: {some(names)}" for kind, names in kinds.items() if names]
    advice: list[str] = []
    if other_dtypes:
        advice.append(f'cast=["{other_dtypes[0]}"] takes a tensor in another dtype, cast=True all of them')
    if missing or unexpected or len(mismatches) > len(other_dtypes):
        one = [*missing, *unexpected, *(name for name, _ in mismatches if name not in other_dtypes)][0]
        advice.append(f'exclude=["{one}"] leaves out what is new, renamed or of another shape')
    advice.append("strict=False takes what fits and reports the rest")
    return MismatchError("the checkpoint does not fit the live state; " + "; ".join(problems), hint="; ".join(advice))


def refuse_unexpected(names: Sequence[str]) -> None:
    """Raise :class:`MismatchError` for names in the checkpoint that no rank has, if there are any."""
    if names:
        raise misfit((), names, ())


def some(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
