"""What the commands print: JSON for programs, tables for people, one clear line for an error. Data goes to standard
output, progress and errors to standard error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import humanize
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ckptd.errors import CkptdError, first_of, to_fields
from ckptd.exits import Exit

T = TypeVar("T")

SHOWN_AFTER_SECONDS = 1.0
"""What is done by then needs no progress bar."""
FILE_COLUMNS = 400
"""How wide a table may be where no terminal limits it."""


def console(*, stderr: bool = False) -> Console:
    """Made anew for each use, as callers replace the streams. Without markup and emoji, as names may hold brackets and
    colons."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = FILE_COLUMNS
    return made


def size(size_bytes: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    return humanize.naturalsize(size_bytes, binary=True)


def counted(count: int, word: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def emit(value: object) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, default=str))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns ``right`` are numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def run(work: Coroutine[Any, Any, T], *, as_json: bool) -> T:
    """Run a command's coroutine, and end the process with an error's exit code where it fails."""
    return guarded(lambda: asyncio.run(work), as_json=as_json)


def guarded(work: Callable[[], T], *, as_json: bool) -> T:
    """Call ``work``; what ckptd raises on purpose becomes one line and an exit code, never a traceback."""
    try:
        return work()
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except (CkptdError, ExceptionGroup) as error:
        _fail(error, as_json)


def _fail(error: Exception, as_json: bool) -> NoReturn:
    error = first_of(error)
    if not isinstance(error, CkptdError):
        raise error
    if as_json:
        emit(to_fields(error))
    else:
        out = console(stderr=True)
        out.print("ckptd:", style="bold red", end=" ")
        out.print(f"{type(error).__name__}: {error.message}")
        if error.hint:
            out.print(f"       {error.hint}", style="dim")
    raise typer.Exit(error.exit_code) from None


class ByteProgress:
    """A progress bar on standard error, for what takes more than a second, where a person is watching."""

    def __init__(self, title: str, *, quiet: bool) -> None:
        out = console(stderr=True)
        self._title = title
        self._began_seconds = time.monotonic()
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=out,
            transient=True,
            disable=quiet or not out.is_terminal,
        )

    def update(self, done: int, total: int) -> None:
        """Bytes done so far, and in all."""
        if self._task is None:
            if time.monotonic() - self._began_seconds < SHOWN_AFTER_SECONDS:
                return
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=total)
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()
