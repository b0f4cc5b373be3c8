"""Options that commands share, and the run they lead to."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptd.checkpoint.processes import holder_here
from ckptd.checkpoint.run import Run
from ckptd.errors import ConfigError
from ckptd.storage import Backend, Limits, open_backend, with_standard_wrappers
from ckptd.wire.channel import SOCKET_VARIABLE

Url = Annotated[str, typer.Argument(metavar="URL", help="The run: file:///…, s3://bucket/prefix, or a folder.")]
Step = Annotated[str, typer.Argument(metavar="STEP", help="latest, a step, or step and generation as in 1000-g3.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="A storage option, such as endpoint_url=http://127.0.0.1:9000; the value is JSON or plain text. Secrets "
        "are better left to the environment.",
    ),
]
Socket = Annotated[Path | None, typer.Option("--socket", help=f"The daemon's socket; else ${SOCKET_VARIABLE}.")]

_UNITS = {
    "": 1,
    **{unit: 1000 ** (i + 1) for i, unit in enumerate("kmgt")},
    **{f"{unit}i": 1024 ** (i + 1) for i, unit in enumerate("kmgt")},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_storage_options(options: Sequence[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` to a dict. Raises :class:`ConfigError`, which never shows a value."""
    found: dict[str, Any] = {}
    for option in options or ():
        key, separator, value = option.partition("=")
        if not separator or not key:
            raise ConfigError("--option takes KEY=VALUE", hint="such as --option region=eu-west-1")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def parse_size(text: str) -> int:
    """``80GiB``, ``1.5tb``, ``4096`` to bytes. Raises :class:`ConfigError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"not a size: {text!r}", hint="such as 80GiB, 1.5TB or 4096")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@contextlib.asynccontextmanager
async def opened_backend(url: str, options: Sequence[str] | None) -> AsyncGenerator[Backend]:
    """The backend at a URL, with retries, closed at the end."""
    backend = with_standard_wrappers(open_backend(url, parse_storage_options(options)), Limits())
    async with contextlib.aclosing(backend):
        yield backend


@contextlib.asynccontextmanager
async def opened_run(url: str, options: Sequence[str] | None) -> AsyncGenerator[Run]:
    """The run at a URL; nothing is created. Raises :class:`ckptd.errors.NoCheckpoint` where there is none."""
    async with opened_backend(url, options) as backend:
        yield await Run.open(backend)


def holder(command: str) -> str:
    """Who reads, for the lease."""
    return holder_here(f"ckptd {command}")
