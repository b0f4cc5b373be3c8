"""The tables: ratios first, seconds after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.goals import Goal, goals
from bench.run import Results
from bench.summary import Figures, summarize
from bench.tables import Row, table


def report(results: Results) -> str:
    """A run as Markdown."""
    figures, failed = summarize(results)
    if not figures:
        return "\n".join(table(_FAILED, failed.items()))
    state_bytes, tensors = _state(results)
    return "\n".join(
        [
            f"## {_title(results)}",
            "",
            *_setting(results),
            "",
            *table(_RATIOS, (_ratios(found, state_bytes) for found in figures.values())),
            "",
            *table(_SECONDS, (_seconds(found) for found in figures.values())),
            "",
            *table(_PROMISES, (_promises(found) for found in figures.values())),
            "",
            *_goals(goals(figures, tensors)),
            *_failures(failed),
        ]
    )


def brief(results: Results, place: str) -> str:
    """A run in one table; ``place``: where its report and plot lie, without what follows the dot."""
    figures, failed = summarize(results)
    rows = [
        _brief(figures[name]) if name in figures else _not_measured(failed[name], name) for name in results["subjects"]
    ]
    title = _title(results) if figures else "no subject was measured"
    more = f"[All figures]({place}.md), [plot]({place}.svg), [samples]({place}.json)."
    return "\n".join([f"### {title}", "", *_setting(results), more, "", *table(_BRIEF, rows), ""])


_BRIEF = (
    "",
    "stall, s",
    "lost, s (95 %)",
    "lost / memcpy",
    "durable, s",
    "durable / bare write",
    "restore, s: cold",
    "memory / state",
    "read back",
    "synced",
    "digest",
    "commit",
)


def _brief(found: Figures) -> Row:
    low, high = found.lost_interval
    promised = _promises(found)
    return [
        found.name,
        f"{found.stall:.4f}",
        f"{found.lost:.2f} ({low:.2f} … {high:.2f})",
        f"{found.lost / found.memcpy:.1f}",
        f"{found.durable:.2f}",
        f"{found.durable / max(found.direct_write, found.memcpy):.2f}",
        f"{found.cold:.2f}",
        f"{found.memory_held / found.state_bytes:.2f}",
        "equal",
        *promised[1:4],
    ]


def _not_measured(words: str, name: str) -> Row:
    """A row that says why."""
    return [name, f"not measured: {words}".replace("|", "/"), *[""] * (len(_BRIEF) - 2)]


def _state(results: Results) -> tuple[int, int]:
    """Bytes and tensors."""
    turn = next(turn for turns in results["subjects"].values() for turn in turns if "tensors" in turn)
    return turn["state_bytes"], turn["tensors"]


def _title(results: Results) -> str:
    state_bytes, tensors = _state(results)
    settings = results["settings"]
    words = [f"{state_bytes / 1e9:.3g} GB in {tensors:,} tensors", settings.get("dtype", "fp32")]
    if settings.get("label"):
        words.append(settings["label"])
    return ", ".join(words)


def _setting(results: Results) -> list[str]:
    machine, settings = results["machine"], results["settings"]
    return [
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"{machine['file_system']}. {settings['rounds']} rounds of {settings['saves']} measured saves; "
        f"{settings['step_seconds']:g} s of computation a step, on one thread.",
    ]


_RATIOS = (
    "ratios",
    "stall / memcpy",
    "lost / memcpy",
    "durable / bare write",
    "first stall / later",
    "cold restore / bare read",
    "warm restore / memcpy",
    "from memory / memcpy",
    "memory held / state",
    "memory peak / state",
    "file / state",
)


def _ratios(found: Figures, state_bytes: int) -> Row:
    ratios = (
        found.stall_in_memcpys,
        found.lost / found.memcpy,
        found.durable / max(found.direct_write, found.memcpy),
        found.first_stall / found.stall,
        found.cold / found.direct_read,
        found.warm / found.memcpy,
        None if found.from_memory is None else found.from_memory / found.memcpy,
        found.memory_held / state_bytes,
        found.memory_peak / state_bytes,
        found.stored_bytes / state_bytes,
    )
    return [found.name, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


_SECONDS = (
    "seconds",
    "call",
    "stall",
    "lost (95 %)",
    "durable",
    "first: stall",
    "first: durable",
    "restore: cold",
    "warm",
    "memory",
    "CPU s/GB: trainer",
    "others",
    "memcpy",
    "bare write",
    "saves",
    "others' cores",
)


def _seconds(found: Figures) -> Row:
    low, high = found.lost_interval
    return [
        found.name,
        f"{found.call:.4f}",
        f"{found.stall:.4f}",
        f"{found.lost:.3f} ({low:.3f} … {high:.3f})",
        f"{found.durable:.3f}",
        f"{found.first_stall:.3f}",
        f"{found.first_durable:.3f}",
        f"{found.cold:.3f}",
        f"{found.warm:.3f}",
        "" if found.from_memory is None else f"{found.from_memory:.3f}",
        f"{found.own_cpu_per_gb:.2f}",
        f"{found.other_cpu_per_gb:.2f}",
        f"{found.memcpy:.3f}",
        f"{found.direct_write:.3f}",
        str(found.saves),
        f"{found.foreign_cores:.1f}",
    ]


_PROMISES = ("complete means", "synced", "digest", "commit", "software")


def _promises(found: Figures) -> Row:
    promised = found.software
    return [
        found.name,
        "yes" if promised["fsync"] else "no: by the harness",
        promised["digest"] or "none",
        promised["commit"] or "none",
        promised["software"],
    ]


def _goals(found: Sequence[Goal]) -> list[str]:
    rows = [
        [
            goal.what,
            f"{'≤' if goal.at_most else '≥'} {goal.limit:.3g} {goal.unit}",
            f"{goal.measured:.3g}",
            "yes" if goal.met else "**no**",
        ]
        for goal in found
    ]
    return [*table(("ckptd's goals", "limit", "measured", "met"), rows), ""] if rows else []


_FAILED = ("not measured", "why")


def _failures(failed: Mapping[str, str]) -> list[str]:
    return [*table(_FAILED, failed.items()), ""] if failed else []
