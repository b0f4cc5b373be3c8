"""``python -m bench``: run it, and write results, tables and plots."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import humanize
import psutil
import typer

from bench import docs
from bench.plans import PLANS
from bench.report import report
from bench.run import Results, free_bytes, run
from bench.settings import Dtype, Settings
from bench.subjects import FLOOR, OURS, SUBJECTS
from bench.summary import summarize

UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9}
ROOM_STATES = 8
"""The disk needs room for so many states: ckptd and the peers delete behind themselves, with a delay."""
MEMORY_STATES = 4.5
"""So many fit into memory at the peak: the state, a third of it for gradients, a copy to compare with, two slots."""

PLANS_HELP = " ".join(f"{name.upper()}: {plan.what}." for name, plan in PLANS.items())
EPILOG = (
    "More benchmarks, each with --help:  python -m bench.s3: upload and download against boto3, about 5 minutes.  "
    "python -m bench.ranks: what the daemon costs for 1 to 8 ranks, about 3 minutes.  "
    "python -m bench.scale: records of up to 16,384 ranks.  python -m bench.docs: only write the tables anew."
)


def size(text: str | int) -> int:
    """Bytes, from a number with or without a unit such as ``1.5GB``."""
    number, unit = str(text).lower().strip(), 1
    for name, factor in UNITS.items():
        if number.endswith(name):
            number, unit = number.removesuffix(name), factor
    try:
        return int(float(number) * unit)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no size; try 512MB or 1.5GB") from None


def bench(
    plan: Annotated[str, typer.Option(help=PLANS_HELP)] = "main",
    state_bytes: Annotated[int | None, typer.Option("--bytes", parser=size, help="Of the state: 512MB, 1.5GB.")] = None,
    tensors: Annotated[int | None, typer.Option(help="Of the state, all equal; else shaped like a GPT.", min=5)] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model's parameters: fp32 or bf16.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each subject.", min=1)] = None,
    saves: Annotated[int | None, typer.Option(help="Measured in a turn.", min=1)] = None,
    warm_ups: Annotated[int | None, typer.Option(help="Saves that do not count, after the first.", min=0)] = None,
    patience_seconds: Annotated[
        float | None, typer.Option("--patience", help="Seconds a turn waits for other programs to be quiet.")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(help="Of computation in a step.", min=0.001)] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Subjects: {'; '.join(SUBJECTS)}.")] = None,
    folder: Annotated[Path, typer.Option(help="On the disk to measure.")] = Path("build/bench"),
    results: Annotated[Path, typer.Option(help="Where results go.", show_default=False)] = docs.RESULTS,
) -> None:
    """Stall, training time lost, time to durable and restore of ckptd and its peers, side by side: a plan, in which
    every other option replaces what the plan says."""
    chosen = _chosen(PLANS, plan.lower())
    if dtype not in (None, "fp32", "bf16"):
        raise typer.BadParameter(f"{dtype!r} is no dtype for this; there are fp32 and bf16")
    names = only or list(chosen.subjects)
    for name in names:
        _chosen(SUBJECTS, name)
    changes: dict[str, Any] = {
        "state_bytes": state_bytes,
        "tensors": tensors,
        "dtype": cast(Dtype, dtype),
        "rounds": rounds,
        "saves": saves,
        "warm_ups": warm_ups,
        "patience_seconds": patience_seconds,
        "step_seconds": step_seconds,
    }
    given = {field: value for field, value in changes.items() if value is not None}
    wanted = dict.fromkeys(replace(settings, **given) for settings in chosen.runs)
    results.mkdir(parents=True, exist_ok=True)
    failed = [name for settings in wanted for name in _run(settings, names, folder, results)]
    if results == docs.RESULTS:
        docs.write()
    raise typer.Exit(1 if any(name in (FLOOR, OURS) for name in failed) else 0)


def _chosen(among: Any, name: str) -> Any:
    if name not in among:
        raise typer.BadParameter(f"nothing is called {name!r}; there are: {'; '.join(among)}")
    return among[name]


def _run(settings: Settings, names: list[str], folder: Path, results: Path) -> list[str]:
    """One run of a plan; returns whom it could not measure."""
    if lacking := _lacking(settings, folder):
        print(f"{settings.name} is left out: {lacking}", file=sys.stderr)
        return []

    def after_turn(found: Results, words: str) -> None:
        print(words, file=sys.stderr, flush=True)
        (results / f"{settings.name}.json").write_text(json.dumps(found, indent=1) + "\n")

    found = run(settings, names, folder, after_turn)
    text = report(found)
    (results / f"{settings.name}.md").write_text(text + "\n")
    print(text)
    return list(summarize(found)[1])


def _lacking(settings: Settings, folder: Path) -> str:
    """What the machine has too little of; empty: nothing."""
    for what, states, there in (
        ("memory", MEMORY_STATES, psutil.virtual_memory().available),
        ("disk", ROOM_STATES, free_bytes(folder)),
    ):
        if (needed := int(states * settings.state_bytes)) > there:
            return f"it needs {humanize.naturalsize(needed)} of {what}, and {humanize.naturalsize(there)} are free"
    return ""


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(epilog=EPILOG)(bench)
    app()
