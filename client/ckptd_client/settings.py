"""What a caller may ask of a checkpointer, checked before anything is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ckptd.errors import ConfigError, UsageError
from ckptd.format.keys import STEP_MAX
from ckptd.pulse.loss_rules import OnBadLoss
from ckptd_client.capture import Declared
from ckptd_client.capture.selection import Selection
from ckptd_client.staging.finite import CheckFinite

LogRanks = Literal["first", "all", "none"]


def check_log(log_ranks: str, on_bad_loss: str) -> None:
    """Raise :class:`ConfigError` for a word that is none."""
    for name, word, words in (
        ("log_ranks", log_ranks, get_args(LogRanks)),
        ("on_bad_loss", on_bad_loss, get_args(OnBadLoss)),
    ):
        if word not in words:
            raise ConfigError(f"{name}={word!r}", hint=f"one of {', '.join(words)}")


def check_step(step: object) -> None:
    """Raise :class:`UsageError` for what is no step."""
    if not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        raise UsageError(f"step {step!r} is not an integer between 0 and {STEP_MAX}")


def declared(replicated: bool | Sequence[str]) -> Declared:
    """Which plain tensors are equal on all ranks. Raises :class:`ConfigError` for what are no patterns."""
    if isinstance(replicated, bool):
        return True if replicated else ()
    if isinstance(replicated, str) or not all(isinstance(pattern, str) and pattern for pattern in replicated):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"replicated={replicated!r} is no list of patterns", hint='as in replicated=["model/*"]')
    return tuple(replicated)


def to_be_finite(check_finite: bool | Sequence[str]) -> CheckFinite:
    """What is looked at for values that are not finite. Raises :class:`ConfigError` for what are no patterns."""
    if isinstance(check_finite, bool):
        return check_finite
    if isinstance(check_finite, str) or not all(isinstance(pattern, str) and pattern for pattern in check_finite):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"check_finite={check_finite!r} is no list of patterns", hint='as in ["model/*"]')
    return Selection(check_finite)


def check_settings(
    every_steps: int | None, every: float | None, slots: int, max_wait: float, verify_load_every: int
) -> None:
    """Raise :class:`ConfigError`, naming all that is wrong."""
    problems: list[str] = []
    if every_steps is not None and every_steps < 1:
        problems.append(f"every_steps={every_steps} is less than 1")
    if every is not None and every <= 0:
        problems.append(f"every={every} is not a positive number of seconds")
    if slots < 1:
        problems.append(f"slots={slots} is less than 1")
    if verify_load_every < 1:
        problems.append(f"verify_load_every={verify_load_every} is less than 1")
    if max_wait < 0:
        problems.append(f"max_wait={max_wait} is negative")
    if problems:
        raise ConfigError("; ".join(problems))
