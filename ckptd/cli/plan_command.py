"""``ckptd plan``: what a restore on some number of ranks would cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptd.checkpoint.forecast import Cost, Sharding, forecast, total
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.selectors import spoken
from ckptd.cli.options import Json, Step, StorageOption, Url, holder, opened_run
from ckptd.cli.output import console, emit, run, size, table
from ckptd.format.keys import RANK_MAX, Version

RANKS_SHOWN_MAX = 40


def plan(
    url: Url,
    step: Step,
    world: Annotated[int, typer.Option("--world", min=1, max=RANK_MAX + 1, help="How many ranks restore.")],
    layout: Annotated[
        Sharding, typer.Option("--layout", help="How they hold each tensor: cut by rows, or all of it each.")
    ] = Sharding.ROWS,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="NAME", help="A part of the state, such as model, or what lies below."),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="List every rank.")] = False,
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Say what each rank of a restore would read of a checkpoint, and how much of it in vain. Reads no tensor.

    What is one rank's own counts only where the number of ranks is the one that saved.
    """

    async def work() -> tuple[Version, list[Cost]]:
        async with opened_run(url, option) as opened:
            version = await opened.resolve(step)
            async with await CheckpointReader.open(opened, version, holder=holder("plan")) as reader:
                return version, await forecast(reader, world, layout, only=only)

    version, costs = run(work(), as_json=json)
    if json:
        emit(
            {
                "checkpoint": spoken(version),
                "world": world,
                "layout": layout.value,
                "only": only,
                "ranks": [{"rank": rank, **_figures(cost)} for rank, cost in enumerate(costs)],
                "total": _figures(total(costs)),
            }
        )
    else:
        _print_costs(costs, None if all else RANKS_SHOWN_MAX)


def _figures(cost: Cost) -> dict[str, Any]:
    return {
        "bytes_wanted": cost.bytes_wanted,
        "bytes_read": cost.bytes_read,
        "amplification": cost.amplification,
        "requests": cost.requests,
        "shards": cost.shards,
    }


def _print_costs(costs: list[Cost], ranks_max: int | None) -> None:
    columns = ("rank", "needed", "read", "read/needed", "requests", "shards")
    made = table(*columns, right=columns)
    for rank, cost in enumerate(costs[:ranks_max]):
        made.add_row(str(rank), *_cells(cost))
    if ranks_max is not None and len(costs) > ranks_max:
        made.add_row("…")
    made.add_row("total", *_cells(total(costs)))
    out = console()
    out.print(made)
    if ranks_max is not None and len(costs) > ranks_max:
        out.print(f"{len(costs) - ranks_max} ranks are left out; see them with --all")


def _cells(cost: Cost) -> tuple[str, ...]:
    ratio = "" if cost.amplification is None else f"{cost.amplification:.3f}"
    return size(cost.bytes_wanted), size(cost.bytes_read), ratio, str(cost.requests), str(cost.shards)
