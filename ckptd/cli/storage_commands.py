"""Commands that look at a run in storage. None of them needs a daemon, and all that they leave is a verdict."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptd.checkpoint import export as exporting
from ckptd.checkpoint.listing import Listed, Shown, list_run, show_checkpoint
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.selectors import spoken
from ckptd.checkpoint.trial import Loader, try_loading
from ckptd.checkpoint.verdicts import record_verdict
from ckptd.checkpoint.verify import Choice, Verification, newest_good
from ckptd.checkpoint.verify import verify as verify_checkpoint
from ckptd.cli.options import Json, Step, StorageOption, Url, holder, opened_run, parse_storage_options
from ckptd.cli.output import ByteProgress, console, counted, emit, guarded, run, size, table
from ckptd.errors import CkptdError, IntegrityError, NoCheckpoint, StorageError, first_line
from ckptd.exits import Exit
from ckptd.format.keys import Version, parse_version
from ckptd.format.records import Manifest
from ckptd.limits import TRIAL_SECONDS

OptionalStep = Annotated[
    str | None, typer.Argument(metavar="[STEP]", help="As for show; left out: the newest that is good.")
]

TENSORS_SHOWN_MAX = 40


def ls(url: Url, option: StorageOption = None, json: Json = False) -> None:
    """List the checkpoints of a run, newest first, and what is beside its line or incomplete."""

    async def work() -> list[Listed]:
        async with opened_run(url, option) as opened:
            return await list_run(opened)

    found = run(work(), as_json=json)
    if json:
        emit([_listed(item) for item in found])
        return
    made = table("checkpoint", "saved", "size", "stored", "ranks", "metrics", "", right=("size", "stored", "ranks"))
    for item in found:
        manifest = item.manifest
        made.add_row(
            spoken(item.version),
            _saved(item.modified_seconds),
            size(manifest.held_bytes) if manifest else "",
            size(manifest.bytes) if manifest else "",
            str(manifest.world) if manifest else "",
            _metrics(manifest.metrics) if manifest else "",
            ", ".join(item.notes),
        )
    if found:
        console().print(made)
    else:
        console(stderr=True).print(f"{url} holds no checkpoint")


def show(
    url: Url,
    step: Step = "latest",
    all: Annotated[bool, typer.Option("--all", help="List every tensor.")] = False,
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Show one checkpoint: where it comes from, its ranks, its tensors."""

    async def work() -> Shown:
        async with opened_run(url, option) as opened:
            return await show_checkpoint(opened, await opened.resolve(step))

    shown = run(work(), as_json=json)
    if json:
        emit(_shown(shown))
    else:
        _print_shown(shown, None if all else TENSORS_SHOWN_MAX)


def verify(
    url: Url,
    step: OptionalStep = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Then load it in a fresh process, by function(url, checkpoint, storage_options).",
        ),
    ] = None,
    load_deadline: Annotated[float, typer.Option(help="Seconds that the load may take.", min=0)] = TRIAL_SECONDS,
    mark: Annotated[bool, typer.Option(help="Record the verdict, for retention and restore to go by.")] = True,
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Read a checkpoint again, all of it, and prove it anew. Without a step: the newest, and if it is damaged the next
    older, until one is good. The verdict is recorded as a mark, verified or suspect, where the store can be written.

    Exit codes: 0 it is good; 5 it is damaged (without a step: all are); 6 there is none; 13 the newest is damaged, and
    an older one is good.
    """

    loader = None if load is None else guarded(lambda: Loader.here(load), as_json=json)

    async def work(bar: ByteProgress) -> Choice:
        async with opened_run(url, option) as opened:

            async def look(version: Version) -> Verification:
                found = await verify_checkpoint(opened, version, on_progress=bar.update)
                if loader is not None and found.good:
                    options = parse_storage_options(option)
                    found = found.with_trial(
                        await try_loading(loader, opened.backend.url, version, options, deadline_seconds=load_deadline)
                    )
                if mark and found.conclusive:
                    await _record(opened, found)
                return found

            if step is None:
                return await _newest_good(opened, look)
            found = await look(await opened.resolve(step))
            return Choice(found.version if found.good else None, (found,))

    with ByteProgress("verifying", quiet=json) as bar:
        choice = run(work(bar), as_json=json)
    if json:
        emit({"good": choice.version and spoken(choice.version), "tried": [_verified(item) for item in choice.tried]})
    else:
        for item in choice.tried:
            _print_verified(item)
    if choice.version is None:
        raise typer.Exit(IntegrityError.exit_code)
    if not all(item.conclusive for item in choice.tried):
        raise typer.Exit(CkptdError.exit_code)
    if len(choice.tried) > 1:
        raise typer.Exit(Exit.OLDER_IS_GOOD)


def export(
    url: Url,
    step: Step,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Empty, or not there yet.")],
    option: StorageOption = None,
    json: Json = False,
) -> None:
    """Write a checkpoint as plain safetensors and JSON, verified on the way, in bounded memory."""

    async def work(bar: ByteProgress) -> exporting.Exported:
        async with opened_run(url, option) as opened:
            version = await opened.resolve(step)
            async with await CheckpointReader.open(opened, version, holder=holder("export")) as reader:
                return await exporting.export(reader, folder, on_progress=bar.update)

    with ByteProgress("exporting", quiet=json) as bar:
        done = run(work(bar), as_json=json)
    if json:
        emit({"folder": str(folder), "files": done.files, "bytes": done.bytes})
    else:
        print(f"{size(done.bytes)} in {counted(len(done.files), 'file')} in {folder}")


async def _record(opened: Run, found: Verification) -> None:
    """As far as that goes: what is read-only can be verified all the same."""
    try:
        await record_verdict(opened, found.version, good=found.good, by=holder("verify"), reason=found.reason)
    except StorageError as error:
        console(stderr=True).print(f"the verdict on {spoken(found.version)} is not recorded: {first_line(error)}")


async def _newest_good(opened: Run, look: Callable[[Version], Awaitable[Verification]]) -> Choice:
    choice = await newest_good(opened, look)
    if not choice.tried:
        raise NoCheckpoint(f"{opened.backend.url} holds no checkpoint")
    return choice


def _saved(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def _metrics(metrics: dict[str, float | None]) -> str:
    return " ".join(f"{name}={'-' if value is None else f'{value:.6g}'}" for name, value in metrics.items())


def _listed(item: Listed) -> dict[str, Any]:
    manifest = item.manifest
    return {
        "checkpoint": spoken(item.version),
        "step": item.version.step,
        "generation": item.version.generation,
        "committed": item.committed,
        "on_line": item.on_line,
        "modified_unix_seconds": item.modified_seconds,
        "bytes": manifest and manifest.held_bytes,
        "stored_bytes": manifest and manifest.bytes,
        "needs": [spoken(parse_version(name)) for name in manifest.references] if manifest else [],
        "world": manifest and manifest.world,
        "metrics": manifest and manifest.metrics,
        "notes": list(item.notes),
    }


def _shown(shown: Shown) -> dict[str, Any]:
    manifest = shown.manifest
    return {
        "checkpoint": spoken(manifest.version),
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "parent": manifest.parent and spoken(manifest.parent.version),
        "launch": manifest.launch,
        "world": manifest.world,
        "bytes": manifest.held_bytes,
        "stored_bytes": manifest.bytes,
        "needs": [spoken(parse_version(name)) for name in manifest.references],
        "parts": list(manifest.parts),
        "metrics": manifest.metrics,
        "marks": [{"mark": mark.mark, "by": mark.by, "reason": mark.reason} for mark in shown.marks],
        "shards": [{"rank": rank, "key": shard.key, "bytes": shard.bytes} for rank, shard in enumerate(shown.shards)],
        "tensors": [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "bytes": t.size_bytes,
                "rank": rank,
                "cut": list(t.cut),
            }
            for rank, t in shown.tensors
        ],
        "aliases": shown.aliases,
    }


def _print_shown(shown: Shown, tensors_max: int | None) -> None:
    out = console()
    manifest = shown.manifest
    facts = table("", "")
    facts.show_header = False
    for name, value in (
        ("checkpoint", spoken(manifest.version)),
        ("run", manifest.run),
        ("from", spoken(manifest.parent.version) if manifest.parent else "the start"),
        ("launch", manifest.launch),
        ("parts", " ".join(manifest.parts)),
        ("metrics", _metrics(manifest.metrics)),
        ("marks", "; ".join(f"{mark.mark} by {mark.by}" for mark in shown.marks)),
        ("size", f"{size(manifest.held_bytes)} by {counted(manifest.world, 'rank')}"),
        ("stored", _stored(manifest)),
    ):
        facts.add_row(name, value)
    out.print(facts)
    made = table("tensor", "dtype", "shape", "size", "pieces", "of", right=("size", "pieces"))
    for rank, tensor in shown.tensors[:tensors_max]:
        owner = "all" if rank is None else f"rank {rank}"
        pieces = " by ".join(map(str, tensor.cut)) or "1"
        made.add_row(tensor.name, tensor.dtype, str(list(tensor.shape)), size(tensor.size_bytes), pieces, owner)
    out.print(made)
    if tensors_max is not None and len(shown.tensors) > tensors_max:
        out.print(f"and {len(shown.tensors) - tensors_max} more; see them with --all")


def _stored(manifest: Manifest) -> str:
    if not manifest.references:
        return "all of it"
    needed = ", ".join(spoken(parse_version(name)) for name in manifest.references)
    return f"{size(manifest.bytes)}, and {size(manifest.referenced_bytes)} in {needed}"


def _verified(item: Verification) -> dict[str, Any]:
    findings: Sequence[Any] = item.findings
    return {
        "checkpoint": spoken(item.version),
        "good": item.good,
        "bytes_verified": item.bytes_verified,
        "findings": [{"level": f.level, "subject": f.subject, "message": f.message, "hint": f.hint} for f in findings],
    }


def _print_verified(item: Verification) -> None:
    out = console()
    if item.good:
        out.print("good    ", style="green", end=" ")
        loaded = ", and loaded" if any(f.subject == "load" and f.level == "ok" for f in item.findings) else ""
        out.print(f"{spoken(item.version)}: {size(item.bytes_verified)} read again and proved{loaded}")
        for finding in item.findings:
            if finding.level == "warning":
                out.print(f"         {finding.subject}: {finding.message}")
        return
    out.print("damaged ", style="bold red", end=" ")
    out.print(spoken(item.version))
    for finding in item.findings:
        if finding.level == "error":
            out.print(f"         {finding.subject}: {finding.message}")
