"""The daemon's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptd.daemon.server import run
from ckptd.daemon.settings import Settings
from ckptd.limits import (
    COMMIT_SECONDS,
    COMMIT_TAKEOVER_SECONDS,
    IDLE_EXIT_SECONDS,
    MIB,
    RETENTION_GRACE_SECONDS,
    VERIFY_BYTES_PER_SECOND,
    VERIFY_DELAY_SECONDS,
)
from ckptd.wire.channel import SOCKET_VARIABLE, default_socket


def daemon(
    socket: Annotated[Path | None, typer.Option(help=f"The Unix socket; else ${SOCKET_VARIABLE}.")] = None,
    allow_uid: Annotated[list[int] | None, typer.Option(help="A further user whose trainers may connect.")] = None,
    memory_budget: Annotated[int | None, typer.Option(help="MiB of shared memory for all arenas.", min=1)] = None,
    bandwidth: Annotated[float | None, typer.Option(help="MiB/s to each store, at most.", min=0.001)] = None,
    copy_bandwidth: Annotated[
        float | None, typer.Option(help="MiB/s of copies to each further tier; else as --bandwidth.", min=0.001)
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests to each store at once.", min=1)] = 32,
    idle_exit: Annotated[float, typer.Option(help="End after so many idle seconds; 0: never.")] = IDLE_EXIT_SECONDS,
    drain: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for saves under way.")] = 300.0,
    commit_deadline: Annotated[float, typer.Option(help="Seconds to wait for other ranks.")] = COMMIT_SECONDS,
    commit_takeover: Annotated[
        float, typer.Option(help="Seconds to wait for rank 0's daemon to commit.")
    ] = COMMIT_TAKEOVER_SECONDS,
    retention_grace: Annotated[
        float, typer.Option(help="Seconds between the announcement of a deletion and the deletion.", min=0)
    ] = RETENTION_GRACE_SECONDS,
    verify_bandwidth: Annotated[
        float, typer.Option(help="MiB/s at which commits are read again and verified; 0: they are not.", min=0)
    ] = VERIFY_BYTES_PER_SECOND / MIB,
    verify_delay: Annotated[
        float, typer.Option(help="Seconds after a commit before it is read again.", min=0)
    ] = VERIFY_DELAY_SECONDS,
    log_file: Annotated[Path | None, typer.Option(help="Else to standard error.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="For journals; else beside the socket.")] = None,
) -> None:
    """Serve the trainers of this machine: own their snapshots, write them, commit them."""
    settings = Settings(
        socket=(socket or default_socket()).absolute(),
        allowed_uids=frozenset(allow_uid or ()),
        memory_budget_bytes=None if memory_budget is None else memory_budget * MIB,
        upload_bytes_per_second=None if bandwidth is None else int(bandwidth * MIB),
        copy_bytes_per_second=None if copy_bandwidth is None else int(copy_bandwidth * MIB),
        requests_inflight=requests,
        idle_exit_seconds=idle_exit or None,
        drain_seconds=drain,
        commit_seconds=commit_deadline,
        commit_takeover_seconds=commit_takeover,
        retention_grace_seconds=retention_grace,
        verify_bytes_per_second=int(verify_bandwidth * MIB) or None,
        verify_delay_seconds=verify_delay,
        log_file=log_file,
        state_dir=state_dir,
    )
    raise typer.Exit(run(settings))


def main() -> None:
    """Entry point of ``python -m ckptd.daemon``."""
    typer.run(daemon)
