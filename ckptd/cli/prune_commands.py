"""Commands that decide what stays of a run. None of them needs a daemon."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import typer

from ckptd.checkpoint import leases
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.retention import Outcome, apply
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.survey import Found, Survey
from ckptd.cli.options import Json, Step, StorageOption, Url, holder, opened_run
from ckptd.cli.output import console, counted, emit, run, table
from ckptd.errors import ConfigError, RunInUse, StorageError
from ckptd.format.keys import Version
from ckptd.limits import BESIDE_SECONDS, RETENTION_GRACE_SECONDS

Reason = Annotated[str, typer.Option(help="Why, for whoever looks later.")]


def prune(
    url: Url,
    last: Annotated[
        int | None,
        typer.Option(help="Keep the newest so many, and as many that are good; 1 beside another rule.", min=1),
    ] = None,
    every_steps: Annotated[int | None, typer.Option(help="Keep the first at or after each multiple.", min=1)] = None,
    every: Annotated[float | None, typer.Option(help="Keep one for each so many seconds.")] = None,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC:min|max:N", help="Keep the N best, as in loss:min:3.")
    ] = None,
    verified: Annotated[int, typer.Option(help="Keep the newest so many that were verified.", min=1)] = 1,
    beside: Annotated[float, typer.Option(help="Keep what is off the line for so many seconds.")] = BESIDE_SECONDS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go and why, and delete nothing.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds from the announcement to the deletion.", min=0)] = (
        RETENTION_GRACE_SECONDS
    ),
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Delete the checkpoints of a run that no rule keeps, and what was left of saves that never were committed.

    Rules add up: what any of them keeps, stays. The newest stays in any case, and so do the newest that was verified,
    pinned ones, and what is being read. Refuses while a trainer lives that writes to the run, as its daemon does this
    itself, by the trainer's own rules.
    """

    async def work() -> tuple[Found, Outcome | None]:
        if last is None and every_steps is None and every is None and best is None:
            raise ConfigError("no rule says what is to stay", hint="give --last, --every-steps, --every or --best")
        rules = Keep(
            last=last or 1,
            every_steps=every_steps,
            every=every,
            best=_best(best),
            verified=verified,
            beside_seconds=beside,
        )
        async with opened_run(url, option) as opened:
            found = await Survey(opened, rules).look()
            if dry_run:
                return found, None
            await _refuse_beside_a_writer(opened)
            generation = max(await opened.generation_numbers(), default=0)
            return found, await apply(opened, rules, generation=generation, grace_seconds=grace)

    found, outcome = run(work(), as_json=json)
    if json:
        emit(_as_json(found, outcome))
    else:
        _print_plan(found)
        if outcome is not None:
            _print_outcome(outcome)
    if outcome is not None and outcome.failed:
        raise typer.Exit(StorageError.exit_code)


def pin(url: Url, step: Step, reason: Reason = "", option: StorageOption = None, json: Json = False) -> None:
    """Keep a checkpoint, whatever retention's rules say."""
    _mark(url, step, reason, option, json, pinned=True)


def unpin(url: Url, step: Step, reason: Reason = "", option: StorageOption = None, json: Json = False) -> None:
    """Leave a checkpoint to retention's rules again."""
    _mark(url, step, reason, option, json, pinned=False)


def _mark(url: str, step: str, reason: str, option: list[str] | None, json: bool, *, pinned: bool) -> None:
    kind: Literal["pinned", "unpinned"] = "pinned" if pinned else "unpinned"

    async def work() -> Version:
        async with opened_run(url, option) as opened:
            version = await opened.resolve(step)
            await opened.add_mark(version, kind, by=holder("pin"), reason=reason)
            await opened.manifest(version)  # not deleted meanwhile: then the mark says nothing
            return version

    version = run(work(), as_json=json)
    if json:
        emit({"checkpoint": spoken(version), "mark": kind})
    else:
        print(f"{kind} {spoken(version)}")


def _best(text: str | None) -> tuple[str, Any, int] | None:
    if text is None:
        return None
    metric, _, rest = text.rpartition(":")
    metric, _, direction = metric.rpartition(":")
    if not metric or not rest.isdecimal():
        raise ConfigError(f"--best {text}", hint="give metric, direction and number, as in loss:min:3")
    return metric, cast(Any, direction), int(rest)


async def _refuse_beside_a_writer(opened: Run) -> None:
    writers = await leases.live(opened.backend, "writer-")
    if writers:
        raise RunInUse(
            f"{opened.backend.url} is being written by {next(iter(writers.values())).holder}",
            hint="its daemon deletes by the rules that its trainer was given; --dry-run shows what these would do",
        )


def _as_json(found: Found, outcome: Outcome | None) -> dict[str, Any]:
    def reasons(of: dict[Version, str]) -> list[dict[str, str]]:
        return [{"checkpoint": spoken(version), "reason": reason} for version, reason in of.items()]

    return {
        "keep": reasons(found.plan.keep),
        "delete": reasons(found.plan.delete),
        "orphans": reasons(dict(found.orphans)),
        "done": outcome
        and {
            "deleted": [spoken(version) for version in outcome.deleted],
            "waiting": reasons(outcome.waiting),
            "failed": reasons(outcome.failed),
        },
    }


def _print_plan(found: Found) -> None:
    made = table("checkpoint", "", "because")
    for verdict, of in (("keep", found.plan.keep), ("delete", found.plan.delete), ("clear up", found.orphans)):
        for version, reason in of.items():
            made.add_row(spoken(version), verdict, reason)
    console().print(made)


def _print_outcome(outcome: Outcome) -> None:
    print(f"deleted {counted(len(outcome.deleted), 'checkpoint')}")
    for version, reason in {**outcome.waiting, **outcome.failed}.items():
        console(stderr=True).print(f"{spoken(version)} stays for now: {reason}")
