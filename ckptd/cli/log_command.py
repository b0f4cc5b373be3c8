"""``ckptd log``: what a training has reported of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptd.checkpoint.training_log import LoggedStep, TrainingLog, read_log
from ckptd.cli.log_exports import plotted, write_csv, write_parquet, write_tensorboard
from ckptd.cli.options import Json, StorageOption, Url, opened_run
from ckptd.cli.output import console, counted, emit, guarded, run, table
from ckptd.errors import AccessDenied, ConfigError
from ckptd.format.log import figure

LAST_SHOWN = 20
PLOT_WIDTH = 100


def log(
    url: Url,
    last: Annotated[
        int | None, typer.Option(help=f"The newest so many steps; {LAST_SHOWN} where all are only shown.", min=1)
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="A:B", help="From step A on, up to B and without it.")] = None,
    columns: Annotated[str | None, typer.Option(help="Which, with commas; else all.")] = None,
    rank: Annotated[int, typer.Option(help="Whose.", min=0)] = 0,
    plot: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Draw it.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a CSV file.")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Parquet file.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write events for TensorBoard, without what was rolled back.")
    ] = None,
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Show the training log of a run: loss, gradient norm, step time and whatever else each step has reported.

    Steps that a later generation went back over are marked. Needs no daemon; what is newer than the daemon's last
    write, half a minute at most, is not there yet. What is damaged is named on standard error, and the rest is shown.
    """
    only_shown = not (plot or csv or parquet or tensorboard)
    newest = LAST_SHOWN if last is None and steps is None and only_shown else last
    wanted = guarded(lambda: _steps(steps), as_json=json)

    async def work() -> TrainingLog:
        async with opened_run(url, option) as opened:
            return await read_log(opened, rank=rank, last=None if wanted else newest)

    found = run(work(), as_json=json)
    names = guarded(lambda: _columns(found, columns, plot or ()), as_json=json)
    rows = _Rows(found, wanted, newest)
    guarded(lambda: _export(rows, names, csv, parquet, tensorboard), as_json=json)
    pictures = guarded(lambda: [plotted(rows, name, PLOT_WIDTH) for name in plot or ()], as_json=json)
    if json:
        emit(_as_json(found, rows, names))
        return
    for name, picture in zip(plot or (), pictures, strict=True):
        print(picture or f"{name}: nothing to draw")
    if only_shown:
        _print(rows, names)
    _print_problems(found, url)


class _Rows:
    """Those that were asked for, as often as they are gone through."""

    def __init__(self, found: TrainingLog, wanted: range | None, last: int | None) -> None:
        self._found = found
        self._wanted = wanted
        self._last = last

    def __iter__(self) -> Iterator[LoggedStep]:
        wanted = self._wanted
        rows = iter(self._found) if wanted is None else (row for row in self._found if row.step in wanted)
        return rows if self._last is None else iter(deque(rows, self._last))


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, stop = text.partition(":")
    if not colon or not all(part.isdecimal() for part in (first, stop) if part):
        raise ConfigError(f"--steps {text}", hint="as in 1000:2000, :500 or 90000:")
    return range(int(first or 0), int(stop) if stop else 10**12)


def _columns(found: TrainingLog, text: str | None, plot: Sequence[str]) -> list[str]:
    names = list(found.columns) if text is None else [name for name in text.split(",") if name]
    if unknown := [name for name in (*names, *plot) if name not in found.columns]:
        raise ConfigError(
            f"the log has no column {', '.join(unknown)}", hint=f"it has {', '.join(found.columns) or 'none'}"
        )
    return names


def _export(
    rows: Iterable[LoggedStep], names: Sequence[str], csv: Path | None, parquet: Path | None, events: Path | None
) -> None:
    try:
        if csv is not None:
            write_csv(csv, rows, names)
        if parquet is not None:
            write_parquet(parquet, rows, names)
        if events is not None:
            write_tensorboard(events, rows)
    except OSError as error:
        raise AccessDenied(f"{error.filename or 'the export'}: {error.strerror or error}") from None


def _print(rows: Iterable[LoggedStep], names: Sequence[str]) -> None:
    numbers = ("step", "generation", "took", *names)
    made = table("step", "generation", "when", "took", *names, "", right=numbers)
    for row in rows:
        made.add_row(
            str(row.step),
            str(row.generation),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.unix_seconds)),
            "" if row.step_seconds is None else f"{row.step_seconds:.3f} s",
            *(f"{row.values[name]:.6g}" if name in row.values else "" for name in names),
            "rolled back" if row.rolled_back else "",
        )
    if made.row_count:
        console().print(made)


def _print_problems(found: TrainingLog, url: str) -> None:
    out = console(stderr=True)
    if not len(found):
        out.print(f"{url} has no training log")
    for note in found.notes:
        out.print(f"damaged: {note}", style="red")
    for generation, missing in found.missing.items():
        out.print(f"generation {generation}: {counted(missing, 'step')} missing", style="yellow")


def _as_json(found: TrainingLog, rows: Iterable[LoggedStep], names: Sequence[str]) -> dict[str, Any]:
    """Figures that are not finite are the words ``nan``, ``inf`` and ``-inf``."""
    return {
        "columns": list(names),
        "rows": [
            {
                "generation": row.generation,
                "step": row.step,
                "unix_seconds": row.unix_seconds,
                "step_seconds": row.step_seconds,
                "rolled_back": row.rolled_back,
                "values": {name: figure(row.values[name]) for name in names if name in row.values},
            }
            for row in rows
        ],
        "missing": [{"generation": generation, "rows": rows} for generation, rows in found.missing.items()],
        "notes": list(found.notes),
    }
