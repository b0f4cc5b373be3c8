"""``python -m bench``: run it, and write results, tables and plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import humanize
import typer

from bench.plot import plot
from bench.report import report
from bench.run import Results, free_bytes, run
from bench.settings import Settings
from bench.subjects import SUBJECTS
from bench.summary import summarize

UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9}
ROOM_STATES = 16
"""The disk needs room for so many states: ckptd and the peers delete behind themselves, with a delay."""


def size(text: str) -> int:
    """Bytes, from a number with or without a unit such as ``1.5GB``."""
    number, unit = text.lower().strip(), 1
    for name, factor in UNITS.items():
        if number.endswith(name):
            number, unit = number.removesuffix(name), factor
    try:
        return int(float(number) * unit)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no size; try 512MB or 1.5GB") from None


def bench(
    state_bytes: Annotated[int, typer.Option("--bytes", parser=size, help="Of the state: 512MB, 1.5GB.")] = 512_000_000,
    tensors: Annotated[int | None, typer.Option(help="Of the state, all equal; else shaped like a GPT.", min=4)] = None,
    rounds: Annotated[int, typer.Option(help="Turns of each subject.", min=1)] = 2,
    saves: Annotated[int, typer.Option(help="Measured in a turn.", min=1)] = 3,
    warm_ups: Annotated[int, typer.Option(help="Saves before them that do not count.", min=0)] = 2,
    patience: Annotated[float, typer.Option(help="Seconds a turn waits for other programs to be quiet.")] = 30.0,
    step_seconds: Annotated[float, typer.Option(help="Of computation in a step.", min=0.001)] = 0.3,
    only: Annotated[list[str] | None, typer.Option(help=f"Subjects: {'; '.join(SUBJECTS)}. Else all.")] = None,
    folder: Annotated[Path, typer.Option(help="On the disk to measure.")] = Path("build/bench"),
    results: Annotated[Path, typer.Option(help="Where results go.")] = Path(__file__).parent / "results",
) -> None:
    """Stall, training time lost, time to durable and restore, side by side."""
    names = only or list(SUBJECTS)
    if unknown := [name for name in names if name not in SUBJECTS]:
        raise typer.BadParameter(f"no subject is called {unknown[0]!r}; there are: {'; '.join(SUBJECTS)}")
    settings = Settings(
        state_bytes=state_bytes,
        tensors=tensors,
        rounds=rounds,
        saves=saves,
        warm_ups=warm_ups,
        patience_seconds=patience,
        step_seconds=step_seconds,
    )
    if (free := free_bytes(folder)) < ROOM_STATES * state_bytes:
        raise typer.BadParameter(
            f"{folder} has {humanize.naturalsize(free)} free, and {ROOM_STATES} states of "
            f"{humanize.naturalsize(state_bytes)} have to fit"
        )
    results.mkdir(parents=True, exist_ok=True)

    def after_turn(found: Results, words: str) -> None:
        print(words, file=sys.stderr, flush=True)
        (results / f"{settings.name}.json").write_text(json.dumps(found, indent=1) + "\n")

    found = run(settings, names, folder, after_turn)
    text = report(found)
    (results / f"{settings.name}.md").write_text(text + "\n")
    figures, failed = summarize(found)
    if figures:
        (results / f"{settings.name}.svg").write_text(plot(figures))
    print(text)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(bench)
