"""The training log for other programs: CSV, Parquet, TensorBoard, and a picture for the terminal."""

from __future__ import annotations

import csv
import importlib
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ckptd.checkpoint.training_log import LoggedStep
from ckptd.errors import ConfigError

FIXED = ("generation", "step", "unix_seconds", "step_seconds", "rolled_back")
"""What each row has, before the columns that the training has named."""
ROWS_AT_ONCE = 65_536
PLOT_LINES = 20


def header(columns: Sequence[str]) -> list[str]:
    """Names of all columns; one of the training's that is a fixed one as well gets a ``_`` behind it."""
    return [*FIXED, *(f"{name}_" if name in FIXED else name for name in columns)]


def cells(row: LoggedStep, columns: Sequence[str]) -> list[Any]:
    """In the order of :func:`header`; ``None`` where the row has nothing."""
    fixed = [row.generation, row.step, row.unix_seconds, row.step_seconds, row.rolled_back]
    return [*fixed, *(row.values.get(name) for name in columns)]


def write_csv(path: Path, rows: Iterable[LoggedStep], columns: Sequence[str]) -> None:
    """Replaces what is there, all at once. Raises :class:`OSError`."""
    with _replaced(path) as fresh, fresh.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header(columns))
        writer.writerows(cells(row, columns) for row in rows)


def write_parquet(path: Path, rows: Iterable[LoggedStep], columns: Sequence[str]) -> None:
    """Replaces what is there, all at once. Absent figures are null, nan is nan. Raises :class:`OSError`."""
    arrow, parquet = _library("pyarrow", "--parquet"), _library("pyarrow.parquet", "--parquet")
    types = [arrow.int32(), arrow.int64(), arrow.float64(), arrow.float64(), arrow.bool_()]
    types += [arrow.float64()] * len(columns)
    schema = arrow.schema(list(zip(header(columns), types, strict=True)))
    with _replaced(path) as fresh, parquet.ParquetWriter(str(fresh), schema) as writer:
        for some in _batches(rows):
            found = zip(*(cells(row, columns) for row in some), strict=True)
            arrays = [arrow.array(list(values), type=kind) for values, kind in zip(found, types, strict=True)]
            writer.write_batch(arrow.record_batch(arrays, schema=schema))


def write_tensorboard(folder: Path, rows: Iterable[LoggedStep]) -> None:
    """Events in a file of its own, of the steps that today's state comes from: TensorBoard has one value for a step."""
    writer = _library("tensorboard.summary", "--tensorboard").Writer(str(folder))
    try:
        for row in rows:
            if row.rolled_back:
                continue
            figures = row.values if row.step_seconds is None else {**row.values, "step_seconds": row.step_seconds}
            for name, value in figures.items():
                writer.add_scalar(name, value, row.step, wall_time=row.unix_seconds)
    finally:
        writer.close()


def plotted(rows: Iterable[LoggedStep], column: str, width: int) -> str:
    """A picture of one column over the steps that today's state comes from, ``width`` characters wide; without figures
    that are not finite. Empty where there is nothing to be seen."""
    points = [
        (row.step, value)
        for row in rows
        if not row.rolled_back and (value := row.values.get(column)) is not None and math.isfinite(value)
    ]
    if not points:
        return ""
    plotext = _library("plotext", "--plot")
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, PLOT_LINES)
    figure.title(column)
    seen = _thinned(points, 8 * width)
    figure.draw(figure.signal([step for step, _ in seen], [value for _, value in seen]).lines())
    return str(plotext.uncolorize(figure.build().string()))


def _thinned(points: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """So many at most: of each stretch the highest and the lowest, so that no spike is lost."""
    length = -(-2 * len(points) // count)
    if length <= 2:
        return points
    stretches = [points[at : at + length] for at in range(0, len(points), length)]
    return [
        point
        for stretch in stretches
        for point in sorted({min(stretch, key=lambda one: one[1]), max(stretch, key=lambda one: one[1])})
    ]


def _library(name: str, option: str) -> Any:
    """Raises :class:`ConfigError`, saying what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{option} needs {name.partition('.')[0]}, which is not installed here: {error}",
            hint="pip install 'ckptd[log]'",
        ) from None


def _batches(rows: Iterable[LoggedStep]) -> Iterator[list[LoggedStep]]:
    iterator = iter(rows)
    while some := list(islice(iterator, ROWS_AT_ONCE)):
        yield some


@contextmanager
def _replaced(path: Path) -> Generator[Path]:
    """A file to write, which takes the place of ``path`` in the end."""
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
