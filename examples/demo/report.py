"""What the demo shows at the end. Every figure in it was measured just now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from safetensors.torch import load_file

from ckptd.limits import MIB
from examples.demo.compare import FINAL_NAME, events
from examples.demo.story import EVERY, STEPS, Story

WARM_UP_STEPS = 2
"""At the start of each life; they are slower, with ckptd or without."""
THREE_LINES = """\
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
with Checkpointer("s3://bucket/runs/gpt", state, every_steps=500) as ckpt:
    start = ckpt.restore()
    for step in range(start.step + 1, steps + 1):
        ...
        ckpt.step(step, loss=loss)
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One telling of the story."""

    where: str
    bytes_per_second: float
    seconds: float
    story: Story
    folder: Path
    differences: list[str]


def step_seconds(folder: Path) -> float:
    """The median duration of a step during which no save was being written."""
    return median(seconds for stretch in _stretches(folder) for seconds in stretch[False])


def _stretches(folder: Path) -> list[dict[bool, list[float]]]:
    """How long steps took from one save to the next, by whether a save was being written."""
    stretches: dict[int, dict[bool, list[float]]] = {}
    life, first = 0, 0
    for event in events(folder, "restored", "step"):
        if event["event"] == "restored":
            life, first = life + 1, event["step"]
        elif event["step"] > first + WARM_UP_STEPS:
            number = life * STEPS + (event["step"] - 1) // EVERY
            stretch = stretches.setdefault(number, {True: [], False: []})
            stretch[event.get("writing", False)].append(event["seconds"])
    return list(stretches.values())


def print_report(console: Console, reference: Path, results: Sequence[Result]) -> int:
    """The table, the verdict, the three lines. Returns the exit code: 1 where any bit differs."""
    headings = (f"{STEPS} steps, {STEPS // EVERY} saves", *(result.where for result in results))
    table = Table(*headings, box=SIMPLE_HEAD)
    for name, show in _ROWS:
        table.add_row(name, *map(show, results))
    console.print()
    console.print(table)
    wrong = [f"{result.where}: {text}" for result in results for text in result.differences]
    if wrong:
        console.print("\nDIFFERENT from the run without ckptd:", style="bold red")
        for text in wrong:
            console.print(f"  {text}", markup=False)
        return 1
    tensors = len(load_file(reference / FINAL_NAME))
    console.print(
        f"\nEqual, bit for bit, to a run that never imported ckptd: the loss of each of {STEPS} steps, "
        f"and all {tensors} tensors of weights, optimizer and random numbers.",
        style="green",
    )
    console.print("\nIn a loop of your own:\n")
    console.print(Syntax(THREE_LINES, "python", background_color="default", highlight_lines={2, 3, 6}))
    return 0


def _saves(result: Result, field: str) -> list[float]:
    """Of the saves whose trainer lived to see them committed."""
    return [event[field] for event in events(result.folder, "save")]


def _stall(result: Result) -> str:
    stalls = _saves(result, "stall_seconds")
    return f"{_time(median(stalls))} (max. {_time(max(stalls))})"


def _slowdown(result: Result) -> str:
    # Each step is compared with those around it: what else the machine does changes from minute to minute.
    ratios = [median(s[True]) / median(s[False]) for s in _stretches(result.folder) if s[True] and s[False]]
    return f"{median(ratios) - 1:+.1%} of {_time(step_seconds(result.folder))}"


def _durable(result: Result) -> str:
    size = max(_saves(result, "bytes"))
    seconds = median(_saves(result, "durable_seconds"))
    return f"{_time(seconds)} for {size / MIB:.0f} MiB"


def _way(result: Result) -> str:
    ways = {event["path"] for event in events(result.folder, "save")}
    return f"{result.bytes_per_second / MIB:.1f} MiB/s, {', '.join(sorted(ways))}"


def _restores(result: Result) -> list[str]:
    found = list(events(result.folder, "restored"))
    return [f"{event['source']}: step {event['step']}, {_time(event['seconds'])}" for event in found]


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


_ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("a save stops training", _stall),
    ("a step during a write", _slowdown),
    ("a save is durable after", _durable),
    ("  at the limit set here", _way),
    ("trainer killed in write", lambda result: str(result.story.trainer_killed_in)),
    ("  committed after", lambda result: _time(result.story.committed_after_seconds)),
    ("  resumed from", lambda result: _restores(result)[1]),
    ("both killed in write", lambda result: str(result.story.both_killed_in)),
    ("  resumed from", lambda result: _restores(result)[2]),
    ("everything took", lambda result: f"{result.seconds:.0f} s"),
)
