"""The command that tries machines before a run. What needs torch is in ``ckptd_client``, and is looked for by name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Annotated, cast

import msgspec
import typer

from ckptd.cli.doctor import Wishes
from ckptd.cli.options import Json, StorageOption, parse_size
from ckptd.cli.output import console, emit, guarded, size, table
from ckptd.cli.preflight import Options
from ckptd.errors import ConfigError
from ckptd.health.report import Report

NEEDED = ("torch", "ckptd_client")
PROGRAM = "ckptd_client.preflight.program"

Program = Callable[[Options, Callable[[Report], None]], int]


def preflight(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="The run, to try its store as well.")] = None,
    single: Annotated[bool, typer.Option("--single", help="This machine only, also under a launcher.")] = False,
    state_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="One rank's state, such as 24GiB.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks on each machine.", min=1)] = 1,
    slots: Annotated[int, typer.Option(help="Snapshots in memory for each rank.", min=1)] = 2,
    keep: Annotated[int, typer.Option(help="Checkpoints that are kept, for the room on disk.", min=1)] = 5,
    probe: Annotated[str, typer.Option(metavar="SIZE", help="What is written to the store and read again.")] = "64MiB",
    traffic: Annotated[str, typer.Option(metavar="SIZE", help="Sent at once between two ranks.")] = "32MiB",
    roll_call: Annotated[float, typer.Option(help="Seconds to wait for all ranks to come.", min=0.1)] = 120.0,
    checks_deadline: Annotated[float, typer.Option(help="Seconds for what a rank tries alone.", min=0.1)] = 300.0,
    pair_deadline: Annotated[float, typer.Option(help="Seconds for two ranks to send.", min=0.1)] = 30.0,
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Try machines before a run, and name the bad one: known answers on processors and GPUs, memory, limits, the store,
    clocks, and traffic between every two ranks. Under torchrun all ranks take part:
    torchrun ... --no-python ckptd preflight URL. Exit code 14 names a bad node; 11: a check failed that no single node
    is to blame for."""

    def options() -> Options:
        _look_for_torch()
        return Options(
            wishes=Wishes(None if state_bytes is None else parse_size(state_bytes), ranks, slots, keep),
            url=url,
            storage_options=tuple(option or ()),
            single=single,
            probe_bytes=max(parse_size(probe), 1),
            traffic_bytes=max(parse_size(traffic), 1),
            roll_call_seconds=roll_call,
            checks_seconds=checks_deadline,
            pair_seconds=pair_deadline,
        )

    def work() -> int:
        told = options()
        program = cast(Program, importlib.import_module(PROGRAM).run)
        return program(told, emit_report if json else print_report)

    raise typer.Exit(guarded(work, as_json=json))


def _look_for_torch() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"preflight needs {' and '.join(missing)}, which this Python does not have",
            hint="pip install 'ckptd[torch]'; `ckptd doctor` checks machine and store without",
        )


def emit_report(report: Report) -> None:
    """As JSON."""
    emit(msgspec.to_builtins(report))


def print_report(report: Report) -> None:
    """For people: a line for each rank, then what is wrong."""
    bad = {rank for node in report.bad_nodes for rank in node.ranks}
    rates: dict[int, list[float]] = {}
    for pair in report.pairs:
        for rank in pair.ranks:
            rates.setdefault(rank, []).append(pair.bytes_per_second)
    members = {member.rank: member for member in report.members}
    made = table("rank", "node", "", "checks", "best rate to another", right=("rank", "checks", "best rate to another"))
    for rank in range(report.world):
        member, own = members.get(rank), rates.get(rank, [])
        checks = member.checks if member else ()
        passed = sum(check.level != "error" for check in checks)
        made.add_row(
            str(rank),
            member.node if member else "-",
            "bad" if rank in bad else "well",
            f"{passed} of {len(checks)}",
            f"{size(max(own))}/s" if any(own) else "-",
        )
    out = console()
    out.print(made)
    for text in report.warnings:
        out.print(text, style="yellow")
    for text in report.faults:
        out.print(f"fault: {text}", style="bold red")
    for node in report.bad_nodes:
        out.print(f"bad node: {node.node or 'unknown, it never said its name'}", style="bold red")
        for reason in node.reasons:
            out.print(f"  {reason}", style="red")
