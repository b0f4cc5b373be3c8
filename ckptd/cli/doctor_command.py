"""The command that finds out what would go wrong here."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from ckptd.cli.doctor import Wishes, check_machine, check_root, check_store
from ckptd.cli.options import Json, Socket, StorageOption, opened_backend, parse_size
from ckptd.cli.output import console, emit, guarded, run
from ckptd.errors import ResourceError
from ckptd.storage import Finding
from ckptd.wire.channel import default_socket

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="The run, to check its store as well.")] = None,
    state_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="One rank's state, such as 24GiB; else only figures.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks on this machine.", min=1)] = 1,
    slots: Annotated[int, typer.Option(help="Snapshots in memory for each rank.", min=1)] = 2,
    keep: Annotated[int, typer.Option(help="Checkpoints that are kept, for the room on disk.", min=1)] = 5,
    socket: Socket = None,
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Find out what would go wrong here: memory, limits, the daemon, and, with a URL, the store: reachable, what is put
    comes back, conditional puts honoured, clocks, room. Exit code 11 where a check fails."""
    wishes = guarded(
        lambda: Wishes(None if state_bytes is None else parse_size(state_bytes), ranks, slots, keep), as_json=json
    )
    findings = check_machine(wishes, socket or default_socket())
    if url is not None:
        findings += run(check_url(url, option, wishes), as_json=json)
    if json:
        emit([{"level": f.level, "subject": f.subject, "message": f.message, "hint": f.hint} for f in findings])
    else:
        hints: set[str] = set()
        for finding in findings:
            _print(finding, hint="" if finding.hint in hints else finding.hint)
            hints.add(finding.hint)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(ResourceError.exit_code)


async def check_url(url: str, option: list[str] | None, wishes: Wishes) -> list[Finding]:
    """What there is to find about the store at a URL."""
    there, findings = check_root(url)
    if there is None:
        return findings
    async with contextlib.AsyncExitStack() as stack:
        backend = await stack.enter_async_context(opened_backend(url, option))
        probed = await stack.enter_async_context(opened_backend(there, option)) if findings else backend
        return findings + await check_store(backend, probed, wishes)


def _print(finding: Finding, *, hint: str) -> None:
    out = console()
    out.print(f"{finding.level:8}", style=_STYLES[finding.level], end=" ")
    out.print(f"{finding.subject}: {finding.message}")
    if hint:
        out.print(f"         {hint}", style="dim")
