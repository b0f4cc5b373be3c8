"""Commands that talk to the daemon."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.progress_bar import ProgressBar

from ckptd.cli.daemon_call import call
from ckptd.cli.options import Json, Socket
from ckptd.cli.output import console, emit, guarded, size, table
from ckptd.wire.channel import default_socket
from ckptd.wire.messages import Done, Drain, GetStatus, Status

STATUS_SECONDS = 10.0
ALERTS_SHOWN = 8
STYLES = {"error": "red", "warning": "yellow"}
GRACE_SECONDS = 10.0
"""Beyond its own deadline, for the daemon to say that it passed."""


def status(socket: Socket = None, json: Json = False) -> None:
    """Show what the daemon is doing: sessions, hangs, saves under way with rate and last progress, failures."""
    reply = guarded(lambda: call(socket or default_socket(), GetStatus(), Status, seconds=STATUS_SECONDS), as_json=json)
    if json:
        emit(reply.status)
    else:
        print_status(reply.status)


def drain(
    deadline: Annotated[float, typer.Option(help="Seconds to wait for what is under way.", min=0.0)] = 300.0,
    socket: Socket = None,
    json: Json = False,
) -> None:
    """Let the daemon finish what is sealed, and end: all of it, or where there is no time for all, the newest that
    there is time for by the bandwidth measured. Fails, naming what is not finished."""
    path = socket or default_socket()
    request = Drain(deadline_seconds=deadline)
    guarded(lambda: call(path, request, Done, seconds=deadline + GRACE_SECONDS), as_json=json)
    if json:
        emit({"drained": True})
    else:
        print("drained: everything is committed, and the daemon has ended")


def print_status(status: dict[str, Any]) -> None:
    """The daemon's status for people."""
    out = console()
    draining = ", draining" if status["draining"] else ""
    out.print(
        f"ckptd {status['version']}, process {status['pid']} at {status['socket']}, up "
        f"{status['uptime_seconds']:.0f} s{draining}; arenas hold {size(status['arena_bytes'])}",
    )
    _print_budgets(status.get("budgets"))
    _print_saves(status["saves"]["listed"])
    _print_sessions(status["sessions"]["listed"])
    _print_tiers(status["tiers"]["listed"])
    for made in status["retention"]["listed"]:
        if made["error"] or made["failed"]:
            why = made["error"] or f"{made['failed']} checkpoints could not be deleted"
            out.print(f"retention at {made['tier']}: {why}", style="red")
    _print_logs(status.get("logs"))
    _print_watch(status["watch"])
    _print_findings(status.get("health"))
    for url, version in status["committed"].items():
        out.print(f"newest commit: {version} of {url}")
    for failure in status["failures"]:
        out.print(
            f"failed: {failure['version']} rank {failure['rank']} while {failure['stage']}: {failure['error']}",
            style="red",
        )


def _print_budgets(budgets: dict[str, Any] | None) -> None:
    """What the daemon may take; one of an older release tells nothing."""
    if budgets is None:
        return
    rates = {
        "writes": budgets["write_bytes_per_second"],
        "copies": budgets["copy_bytes_per_second"],
        "verification": budgets["verify_bytes_per_second"],
    }
    said = [
        f"{budgets['processors']:g} processors, threads: {budgets['digest_threads']} for digests, "
        f"{budgets['io_threads']} for each store, {budgets['other_threads']} others",
        f"nice {budgets['nice']}, I/O {budgets['io_priority']}",
        *(f"{what} {size(rate)}/s" for what, rate in rates.items() if rate is not None),
    ]
    if budgets["memory_bytes"] is not None:
        said.append(f"memory {size(budgets['memory_bytes'])}")
    console().print(f"budgets: {'; '.join(said)}")


def _print_logs(logs: dict[str, Any] | None) -> None:
    """What is wrong with training logs; a daemon of an older release tells nothing."""
    for life in logs["listed"] if logs else ():
        whose = f"training log of {life['run']}, rank {life['rank']}"
        for tier in life["tiers"]:
            if tier["lost"]:
                console().print(f"{whose}: {tier['lost']} steps are lost for {tier['tier']}", style="yellow")
            if tier["error"]:
                console().print(f"{whose}: not stored at {tier['tier']}: {tier['error']}", style="red")


def _print_findings(health: dict[str, Any] | None) -> None:
    """What the daemon noticed about its machine; a daemon of an older release tells nothing."""
    for seen in health["findings"]["listed"] if health else ():
        ago = time.time() - seen["last_unix_seconds"]
        text = f"{seen['place']}: {seen['subject']}: {seen['message']} ({seen['times']} times, last {ago:.0f} s ago)"
        console().print(text, style="red" if seen["level"] == "error" else "yellow")


def _print_saves(saves: list[dict[str, Any]]) -> None:
    if not saves:
        return
    made = table("save", "rank", "stage", "", "done", "rate", "last progress", right=("done", "rate", "last progress"))
    for save in saves:
        made.add_row(
            save["version"],
            str(save["rank"]),
            save["stage"],
            ProgressBar(total=max(save["bytes"], 1), completed=save["bytes_done"], width=20),
            f"{size(save['bytes_done'])} of {size(save['bytes'])}",
            f"{size(save['bytes_per_second'])}/s",
            f"{save['progress_age_seconds']:.1f} s ago",
        )
    console().print(made)


def _print_tiers(tiers: list[dict[str, Any]]) -> None:
    if not tiers:
        return
    made = table("further tier", "", "committed", "behind", "copying", "failures", right=("failures",))
    for tier in tiers:
        behind = f"{tier['behind_steps']} steps, {tier['behind_seconds']:.0f} s" if tier["behind_seconds"] else "-"
        copying = "-"
        if tier["copying"] is not None:
            copying = f"{tier['copying']}: {size(tier['bytes_done'])} of {size(tier['bytes'])}"
        made.add_row(tier["tier"], tier["state"], tier["committed"] or "-", behind, copying, str(tier["failures"]))
    console().print(made)
    for tier in tiers:
        if tier["error"]:
            console().print(f"not copied to {tier['tier']}: {tier['error']}", style="red")


def _print_watch(watch: dict[str, Any]) -> None:
    out = console()
    for run, limits in watch["limits_seconds"].items():
        named = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in limits.items())
        out.print(f"hang limits of {run}: {named}")
    for seat in watch["stalled"]:
        out.print(f"no progress: {seat}", style="red")
    if watch["dry_run"]:
        counts = ", ".join(f"{what} {count}" for what, count in watch["counts"].items())
        out.print(f"dry run: about hangs, would have done: {counts or 'nothing'}")
    for alert in watch["alerts"][-ALERTS_SHOWN:]:
        report = f"; report: {alert['report']}" if alert["report"] else ""
        out.print(f"{alert['kind']}: {alert['message']}{report}", style=STYLES.get(alert["level"]))


def _print_sessions(sessions: list[dict[str, Any]]) -> None:
    if not sessions:
        return
    right = ("rank", "process", "step", "last beat", "limit")
    made = table("run", "rank", "process", "step", "phase", "last beat", "limit", right=right)
    for session in sessions:
        beat = session["beat"] or {"step": "-", "phase": "-", "age_seconds": None, "limit_seconds": None}
        age = "-" if beat["age_seconds"] is None else f"{beat['age_seconds']:.1f} s ago"
        made.add_row(
            session["run"],
            f"{session['rank']} of {session['world']}",
            str(session["pid"]),
            str(beat["step"]),
            beat["phase"],
            age,
            "-" if beat["limit_seconds"] is None else f"{beat['limit_seconds']:.1f} s",
        )
    console().print(made)
