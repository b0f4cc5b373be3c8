"""A trial: a checkpoint is really loaded, by a function of the user's, in a fresh process whose exit is judged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.trial_child import NOT_BEGUN, Order
from ckptd.errors import ConfigError
from ckptd.format.keys import Version

OUTPUT_TAIL_BYTES = 4096
"""Of what the process printed: its last line is the reason."""
_NOT_ITS_OWN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Somebody else's doing, such as the kernel's for want of memory."""


class Loader(msgspec.Struct, frozen=True, kw_only=True):
    """What loads a checkpoint, and where it is found."""

    function: str
    """``module:function``; called with URL, checkpoint (as in ``1000-g3``) and storage options. What it raises is the
    checkpoint's fault."""
    python: str = ""
    """The interpreter; empty: this one."""
    folder: str = ""
    """Where it runs; empty: here."""
    path: tuple[str, ...] = ()
    """Where its modules are, beside what that interpreter knows."""

    def __post_init__(self) -> None:
        module, separator, function = self.function.partition(":")
        if not (separator and function.isidentifier() and all(map(str.isidentifier, module.split(".")))):
            raise ConfigError(f"not a function: {self.function!r}", hint="give module:function, as in my.checks:load")

    @classmethod
    def here(cls, function: str) -> Loader:
        """With this process's interpreter, folder and modules. Raises :class:`ConfigError`."""
        folder = os.getcwd()
        return cls(
            function=function,
            python=sys.executable,
            folder=folder,
            path=tuple(dict.fromkeys(entry or folder for entry in sys.path)),
        )


@dataclass(frozen=True, slots=True)
class Tried:
    """How a trial ended."""

    result: Literal["good", "bad", "unknown"]
    """``unknown``: it says nothing about the checkpoint. The function was not found, say, or took too long."""
    reason: str = ""


async def try_loading(
    loader: Loader, url: str, version: Version, options: Mapping[str, Any], *, deadline_seconds: float
) -> Tried:
    """Load a checkpoint in a process of its own, of the lowest priority for processor and disk, which ends, with all
    that it has started, at the latest with the deadline and with this process. Never raises for what happens there.

    Options, which may hold secrets, go there through a pipe.
    """
    order = msgspec.json.encode(
        Order(function=loader.function, url=url, checkpoint=spoken(version), storage_options=dict(options))
    )
    path = os.pathsep.join([*loader.path, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                loader.python or sys.executable,
                "-m",
                "ckptd.checkpoint.trial_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=loader.folder or None,
                env={**os.environ, **({"PYTHONPATH": path} if path else {})},
                start_new_session=True,
            )
        except OSError as error:
            return Tried("unknown", f"{loader.function} was not begun: {error.filename or ''} {error.strerror}")
        try:
            status = await _finished(process, order, deadline_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started too
            await process.wait()
        return _judged(loader, status, _last_line(output.fileno()), deadline_seconds)


async def _finished(process: asyncio.subprocess.Process, order: bytes, deadline_seconds: float) -> int | None:
    """The exit status; ``None`` when the time is up. Its input stays open until then: its end is ours."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(len(order).to_bytes(8, "big") + order)
    try:
        async with asyncio.timeout(deadline_seconds):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        process.stdin.close()


def _judged(loader: Loader, status: int | None, last_line: str, deadline_seconds: float) -> Tried:
    if status == 0:
        return Tried("good")
    if status is None:
        return Tried("unknown", f"{loader.function} did not end within {deadline_seconds:g} s")
    if status == NOT_BEGUN:
        return Tried("unknown", f"{loader.function} was not begun: {last_line}")
    if status < 0 and -status in _NOT_ITS_OWN:
        return Tried("unknown", f"{loader.function} was ended by {signal.Signals(-status).name}")
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return Tried("bad", f"{loader.function} {how}: {last_line or 'it said nothing'}")


def _last_line(output: int) -> str:
    size = os.fstat(output).st_size
    tail = os.pread(output, OUTPUT_TAIL_BYTES, max(size - OUTPUT_TAIL_BYTES, 0)).decode(errors="replace")
    return next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
