"""What a caller may ask of a checkpointer, checked before anything is done."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from numbers import Integral, Real
from typing import Any, Literal, cast, get_args

import torch

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.trial import Loader
from ckptd.errors import ConfigError, UsageError, near
from ckptd.format.keys import STEP_MAX
from ckptd.pulse.loss_rules import LossRules, OnBadLoss
from ckptd_client.agreement import Agreement
from ckptd_client.capture import Capture, Declared, State
from ckptd_client.capture.selection import EVERYTHING, Selection, refuse_unmatched, unmatched
from ckptd_client.saving import OnError, OnFull
from ckptd_client.staging.finite import CheckFinite
from ckptd_client.staging.stager import Check

LogRanks = Literal["first", "all", "none"]

_WORDS: Mapping[str, Any] = {
    "log_ranks": LogRanks,
    "on_bad_loss": OnBadLoss,
    "on_full": OnFull,
    "on_error": OnError,
    "check": Check,
}


def check_words(**words: str) -> None:
    """Raise :class:`ConfigError`, naming the option, for a word that is none of its own."""
    for option, word in words.items():
        known = get_args(_WORDS[option])
        if word not in known:
            meant = near(word, known) if isinstance(word, str) else []  # pyright: ignore[reportUnnecessaryIsInstance]
            said = f"; near is {meant[0]!r}" if meant else ""
            raise ConfigError(f"{option}={word!r}", hint=f"one of {', '.join(map(repr, known))}{said}")


def check_step(step: object, last: int = 0) -> None:
    """Raise :class:`UsageError` for what is no step, and for one before the last."""
    if not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        raise UsageError(f"step {step!r} is not an integer between 0 and {STEP_MAX}")
    if step < last:
        raise UsageError(
            f"step {step} comes after step {last}: steps went backwards",
            hint="a step is the number of optimizer steps done; to go back to an older one, start anew and restore it",
        )


def declared(replicated: bool | Sequence[str]) -> Declared:
    """Which plain tensors are equal on all ranks. Raises :class:`ConfigError` for what are no patterns."""
    if isinstance(replicated, bool):
        return True if replicated else ()
    return patterns("replicated", replicated)


def patterns(option: str, given: object) -> tuple[str, ...]:
    """The patterns of an option. Raises :class:`ConfigError` for what are none: a single string too, which Python takes
    for a list of its letters."""
    found = tuple(cast("Sequence[object]", given)) if isinstance(given, list | tuple | set | frozenset) else None
    if found is None or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise ConfigError(f"{option}={given!r} is no list of patterns", hint=f'as in {option}=["model/*"]')
    return cast("tuple[str, ...]", found)


def selections(
    state: State, include: object, exclude: object, cast_: object, *, weights_only: bool
) -> tuple[Selection, Selection]:
    """What a restore is to take, and what it may take in another dtype. Raises :class:`ConfigError`."""
    if weights_only and include is not None:
        raise ConfigError("weights_only and include", hint="give one of them; exclude goes with either")
    chosen = None if include is None else patterns("include", include)
    if weights_only:
        chosen = tuple(state.module_names())
        if not chosen:
            raise ConfigError("weights_only=True, and the state has no module")
    casts = EVERYTHING if cast_ is True else Selection(patterns("cast", cast_) if cast_ else ())
    return Selection(chosen, patterns("exclude", exclude)), casts


def to_be_finite(check_finite: bool | Sequence[str]) -> CheckFinite:
    """What is looked at for values that are not finite. Raises :class:`ConfigError` for what are no patterns."""
    if isinstance(check_finite, bool):
        return check_finite
    return Selection(patterns("check_finite", check_finite))


def check_settings(
    *, every_steps: object, every: object, slots: object, max_wait: object, verify_load_every: object
) -> None:
    """Raise :class:`ConfigError`, naming all that is wrong."""
    problems: list[str] = []
    counts = {"every_steps": every_steps, "slots": slots, "verify_load_every": verify_load_every}
    for name, value in counts.items():
        optional = value is None and name == "every_steps"
        if not optional and not (_is_number(value, Integral) and cast(int, value) >= 1):
            problems.append(f"{name}={value!r} is not an integer of at least 1")
    if every is not None and not (_is_number(every, Real) and cast(float, every) > 0):
        problems.append(f"every={every!r} is not a positive number of seconds")
    if not (_is_number(max_wait, Real) and cast(float, max_wait) >= 0):
        problems.append(f"max_wait={max_wait!r} is not a number of seconds, 0 or more")
    if problems:
        raise ConfigError("; ".join(problems))


def check_values(state: object, keep: object, loss_rules: object) -> None:
    """Raise :class:`ConfigError` for what is of another kind than it must be."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"state is a {type(state).__name__}, not a dict",
            hint='as in state={"model": model, "optimizer": optimizer}',
        )
    if not state:
        raise ConfigError("state={} has nothing to be saved", hint='as in state={"model": model}')
    if not isinstance(keep, Keep | None):
        raise ConfigError(f"keep={keep!r} is no Keep", hint="as in keep=Keep(last=3)")
    if not isinstance(loss_rules, LossRules | None):
        raise ConfigError(f"loss_rules={loss_rules!r} are no LossRules", hint="as in LossRules(spike_steps=5)")


def check_metric(step: int, name: str, value: object) -> None:
    """Raise :class:`UsageError` for what is no number, nor ``None``. Reads nothing from a device."""
    if value is None or isinstance(value, int | float):
        return
    if hasattr(value, "item"):
        count = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 1)
        if count == 1:
            return
        found = f"a {type(value).__name__} of {count} elements"
    elif hasattr(value, "__float__"):
        return
    else:
        found = f"{value!r:.80}"
    raise UsageError(f"step {step}: {name} is {found}", hint="metrics are numbers, or tensors of one element")


def loader_of(verify_load: str | None) -> Loader | None:
    """The function that is to load checkpoints. Raises :class:`ConfigError` for one whose module is not found; nothing
    is imported for that."""
    if verify_load is None:
        return None
    loader = Loader.here(verify_load)
    module, _, function = verify_load.partition(":")
    loaded = sys.modules.get(module)
    if loaded is not None and not hasattr(loaded, function):
        raise ConfigError(f"verify_load={verify_load!r}: {module} has no {function}")
    if loaded is None and not _is_there(module, [*sys.path, loader.folder]):
        raise ConfigError(
            f"verify_load={verify_load!r}: there is no module {module}", hint="is it in sys.path or in this folder?"
        )
    return loader


def _is_there(module: str, folders: Sequence[str]) -> bool:
    first, *others = module.split(".")
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(first) or PathFinder.find_spec(first, folders)
        for i, _ in enumerate(others):
            if spec is None or spec.submodule_search_locations is None:
                return False
            name = ".".join([first, *others[: i + 1]])
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        return spec is not None
    return False


def refuse_patterns_of_nothing(
    agreement: Agreement, state: State, capture: Capture, options: Mapping[str, Declared | CheckFinite]
) -> None:
    """Raise :class:`ConfigError` on all ranks for a pattern that stands for no tensor on any of them, now or once the
    optimizers have their state."""
    given = {
        option: value.patterns if isinstance(value, Selection) else value
        for option, value in options.items()
        if not isinstance(value, bool) and value
    }
    if not given:
        return
    names = [*(leaf.name for leaf in capture.leaves), *capture.aliases]
    to_come = state.to_come(names)

    def mine() -> dict[str, dict[str, list[str]]]:
        return {
            option: {
                pattern: meant
                for pattern, meant in unmatched(found, names).items()
                if not any(_may_be_below(pattern, place) for place in to_come)
            }
            for option, found in given.items()
        }

    def judge(all_: list[dict[str, dict[str, list[str]]]]) -> None:
        for option in given:
            first, *others = [of_rank.get(option, {}) for of_rank in all_]
            nowhere = {pattern: meant for pattern, meant in first.items() if all(pattern in o for o in others)}
            refuse_unmatched(nowhere, option)

    agreement.decide("patterns", mine, judge)


def _may_be_below(pattern: str, place: str) -> bool:
    """Whether a pattern may stand for something below a place where there is nothing yet."""
    plain = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    return plain.startswith(place) or place.startswith(plain)


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
