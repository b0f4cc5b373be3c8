"""The daemon's command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptd.daemon.budgets import NICE_MAX, Budgets, IoPriority
from ckptd.daemon.server import run
from ckptd.daemon.settings import Settings
from ckptd.daemon.watch.rules import WatchRules
from ckptd.limits import (
    COMMIT_SECONDS,
    COMMIT_TAKEOVER_SECONDS,
    DIGEST_THREADS_MAX,
    HANG_FACTOR,
    HANG_FIRST_SECONDS,
    HANG_FLOOR_SECONDS,
    HANG_GRACE_SECONDS,
    HANG_SAVE_SECONDS,
    HEALTH_SECONDS,
    IDLE_EXIT_SECONDS,
    IO_THREADS_PER_PROCESSOR,
    LOG_WRITE_SECONDS,
    MIB,
    REQUESTS_INFLIGHT,
    RETENTION_GRACE_SECONDS,
    VERIFY_BYTES_PER_SECOND,
    VERIFY_DELAY_SECONDS,
)
from ckptd.wire.channel import SOCKET_VARIABLE, default_socket

BUDGETS = "What it may take of the machine"
CHECKPOINTS = "Commits, deletions, verification"
WATCHING = "Watching over trainers"
TELLING = "What it tells"


def _option(panel: str, help: str, **rules: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **rules)


def _budget(help: str, variable: str, **rules: Any) -> Any:
    """A budget can be set in the environment too, where it reaches the daemon that a client starts."""
    return _option(BUDGETS, help, envvar=variable, **rules)


def daemon(
    socket: Annotated[Path | None, typer.Option(help=f"The Unix socket; else ${SOCKET_VARIABLE}.")] = None,
    allow_uid: Annotated[list[int] | None, typer.Option(help="A further user whose trainers may connect.")] = None,
    idle_exit: Annotated[float, typer.Option(help="End after so many idle seconds; 0: never.")] = IDLE_EXIT_SECONDS,
    drain: Annotated[float, typer.Option(help="Seconds that SIGTERM waits for saves under way.")] = 300.0,
    state_dir: Annotated[Path | None, typer.Option(help="For journals; else beside the socket.")] = None,
    # Budgets
    memory_budget: Annotated[
        int | None, _budget("MiB of shared memory for all arenas.", "CKPTD_MEMORY_BUDGET", min=1)
    ] = None,
    bandwidth: Annotated[
        float | None, _budget("MiB/s that are written, to all stores together.", "CKPTD_BANDWIDTH", min=0.001)
    ] = None,
    copy_bandwidth: Annotated[
        float | None,
        _budget("MiB/s of copies to further tiers; else they share --bandwidth.", "CKPTD_COPY_BANDWIDTH", min=0.001),
    ] = None,
    verify_bandwidth: Annotated[
        float,
        _budget(
            "MiB/s at which commits are read again and verified; 0: they are not.", "CKPTD_VERIFY_BANDWIDTH", min=0
        ),
    ] = VERIFY_BYTES_PER_SECOND / MIB,
    requests: Annotated[int, _budget("Operations on each store at once.", "CKPTD_REQUESTS", min=1)] = REQUESTS_INFLIGHT,
    io_threads: Annotated[
        int | None,
        _budget(
            f"Threads for each store; else {IO_THREADS_PER_PROCESSOR} for each processor. A store's own options may "
            "say fewer.",
            "CKPTD_IO_THREADS",
            min=1,
        ),
    ] = None,
    digest_threads: Annotated[
        int | None,
        _budget(
            f"Threads that compute digests; else one for each processor, up to {DIGEST_THREADS_MAX}.",
            "CKPTD_DIGEST_THREADS",
            min=1,
        ),
    ] = None,
    nice: Annotated[int, _budget("How far it stands back for other processes.", "CKPTD_NICE", min=0, max=NICE_MAX)] = 0,
    io_priority: Annotated[
        IoPriority,
        _budget("Whose I/O goes first: low after others', idle when there is no other.", "CKPTD_IO_PRIORITY"),
    ] = IoPriority.NORMAL,
    # Checkpoints
    commit_deadline: Annotated[float, _option(CHECKPOINTS, "Seconds to wait for other ranks.")] = COMMIT_SECONDS,
    commit_takeover: Annotated[
        float, _option(CHECKPOINTS, "Seconds to wait for rank 0's daemon to commit.")
    ] = COMMIT_TAKEOVER_SECONDS,
    retention_grace: Annotated[
        float, _option(CHECKPOINTS, "Seconds between the announcement of a deletion and the deletion.", min=0)
    ] = RETENTION_GRACE_SECONDS,
    verify_delay: Annotated[
        float, _option(CHECKPOINTS, "Seconds after a commit before it is read again.", min=0)
    ] = VERIFY_DELAY_SECONDS,
    log_write: Annotated[
        float, _option(CHECKPOINTS, "Seconds that rows of a training log wait at most before they are stored.", min=0)
    ] = LOG_WRITE_SECONDS,
    # Watching
    on_hang: Annotated[
        str,
        _option(WATCHING, "What to do about a hang: any of notify, dump, end, with commas; or nothing."),
    ] = "notify,dump",
    hang_dry_run: Annotated[bool, _option(WATCHING, "Only count what would be done about hangs.")] = False,
    hang_floor: Annotated[
        float, _option(WATCHING, "Seconds that a step may always take.", min=0.05)
    ] = HANG_FLOOR_SECONDS,
    hang_first: Annotated[
        float, _option(WATCHING, "Seconds for start, first steps, compiling, restoring, evaluation.", min=0.05)
    ] = HANG_FIRST_SECONDS,
    hang_save: Annotated[
        float, _option(WATCHING, "Seconds for a trainer's own part in a save.", min=0.05)
    ] = HANG_SAVE_SECONDS,
    hang_factor: Annotated[
        float, _option(WATCHING, "Times the usual duration that makes the learned limit.", min=1.1)
    ] = HANG_FACTOR,
    hang_grace: Annotated[
        float, _option(WATCHING, "Seconds from the report of a hang to the end, if wanted.", min=0.0)
    ] = HANG_GRACE_SECONDS,
    health_every: Annotated[float, _option(WATCHING, "Seconds between looks at the machine.", min=0)] = HEALTH_SECONDS,
    # Telling
    metrics: Annotated[
        str | None,
        _option(TELLING, "host:port of a web server with /metrics, /healthz and /readyz."),
    ] = None,
    webhook: Annotated[
        str | None,
        _option(TELLING, "A URL to which alerts are posted as JSON.", envvar="CKPTD_WEBHOOK"),
    ] = None,
    log_file: Annotated[Path | None, _option(TELLING, "Else to standard error.")] = None,
) -> None:
    """Serve the trainers of this machine: own their snapshots, write them, commit them."""
    settings = Settings(
        socket=(socket or default_socket()).absolute(),
        allowed_uids=frozenset(allow_uid or ()),
        budgets=Budgets(
            memory_bytes=None if memory_budget is None else memory_budget * MIB,
            write_bytes_per_second=None if bandwidth is None else int(bandwidth * MIB),
            copy_bytes_per_second=None if copy_bandwidth is None else int(copy_bandwidth * MIB),
            verify_bytes_per_second=int(verify_bandwidth * MIB) or None,
            requests_inflight=requests,
            io_threads=io_threads,
            digest_threads=digest_threads,
            nice=nice,
            io_priority=io_priority,
        ),
        idle_exit_seconds=idle_exit or None,
        drain_seconds=drain,
        commit_seconds=commit_deadline,
        commit_takeover_seconds=commit_takeover,
        retention_grace_seconds=retention_grace,
        verify_delay_seconds=verify_delay,
        log_write_seconds=log_write,
        watch=watch_rules(
            on_hang,
            dry_run=hang_dry_run,
            floor_seconds=hang_floor,
            first_seconds=hang_first,
            save_seconds=hang_save,
            factor=hang_factor,
            grace_seconds=hang_grace,
        ),
        health_seconds=health_every,
        metrics_address=metrics,
        webhook=webhook,
        log_file=log_file,
        state_dir=state_dir,
    )
    raise typer.Exit(run(settings))


def watch_rules(on_hang: str, **rules: Any) -> WatchRules:
    """The rungs by their names, and everything else of :class:`WatchRules`."""
    rungs = {rung.strip() for rung in on_hang.split(",")} - {"", "nothing"}
    if unknown := rungs - {"notify", "dump", "end"}:
        raise typer.BadParameter(f"--on-hang {', '.join(sorted(unknown))}: any of notify, dump, end; or nothing")
    return WatchRules(notify="notify" in rungs, dump="dump" in rungs, end="end" in rungs, **rules)


def main() -> None:
    """Entry point of ``python -m ckptd.daemon``."""
    typer.run(daemon)
