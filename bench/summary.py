"""From samples to figures: medians over all turns of a subject, and ratios within the run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.run import Results
from bench.settings import FOREIGN_CORES_MAX

SAVES_MIN = 5
"""So many are counted at least, where there are so many."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Figures:
    """One subject, in seconds and bytes; ``None`` for what it cannot do."""

    name: str
    state_bytes: int
    software: dict[str, Any]
    saves: int
    foreign_cores: float
    """Of other programs, while these saves were taken; the median."""
    memcpy: float
    """One bare copy of the state, in the same turns."""
    call: float
    stall: float
    """The call, and the wait before the optimizer's step."""
    stall_in_memcpys: float
    """Save by save."""
    first_stall: float
    durable: float
    first_durable: float
    lost: float
    lost_interval: tuple[float, float]
    """95 %, of the median, by resampling."""
    own_cpu_per_gb: float
    """Of the trainer's process, the call and other threads, for each 10**9 bytes."""
    other_cpu_per_gb: float
    """Of other processes: a daemon, a writer."""
    direct_write: float
    """A bare direct write of the state, in the same turns."""
    direct_read: float
    cold: float
    warm: float
    from_memory: float | None
    memory_held: int
    """More than without the subject, between saves."""
    memory_peak: int
    memory_private: int
    """Of the peak, what is no shared memory: for ckptd, what comes on top of the arena."""
    stored_bytes: int


def summarize(results: Results) -> tuple[dict[str, Figures], dict[str, str]]:
    """The figures of each subject that has had a good turn, and of the others what went wrong."""
    figures: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    for name, turns in results["subjects"].items():
        good = [turn for turn in turns if "error" not in turn]
        if good:
            figures[name] = _figures(name, good)
        else:
            failed[name] = turns[-1]["error"] if turns else "it has not had a turn"
    return figures, failed


def _figures(name: str, turns: Sequence[dict[str, Any]]) -> Figures:
    saves = quiet([save for turn in turns for save in turn["saves"]])
    gigabytes = turns[0]["state_bytes"] / 1e9
    lost = [save["lost"] for save in saves]

    def of_saves(field: str) -> float:
        return float(median(save[field] for save in saves))

    def of_first(field: str) -> float:
        return float(median(turn["first"][field] for turn in turns))

    def restored(kind: str) -> float:
        return float(median(seconds for turn in turns for seconds in turn["restore"][kind]))

    return Figures(
        name=name,
        state_bytes=turns[0]["state_bytes"],
        software=turns[0]["software"],
        saves=len(saves),
        foreign_cores=of_saves("foreign_cores"),
        memcpy=of_saves("memcpy"),
        call=of_saves("call"),
        stall=median(save["call"] + save["fence"] for save in saves),
        stall_in_memcpys=median((save["call"] + save["fence"]) / save["memcpy"] for save in saves),
        first_stall=median(turn["first"]["call"] + turn["first"]["fence"] for turn in turns),
        durable=of_saves("durable"),
        first_durable=of_first("durable"),
        lost=median(lost),
        lost_interval=interval(lost),
        own_cpu_per_gb=median(save["call_cpu"] + save["own_threads_cpu"] for save in saves) / gigabytes,
        other_cpu_per_gb=sum(save["other_processes_cpu"] for save in saves) / len(saves) / gigabytes,
        direct_write=median(seconds for turn in turns for seconds in turn["direct_write"]),
        direct_read=median(seconds for turn in turns for seconds in turn["direct_read"]),
        cold=restored("cold"),
        warm=restored("warm"),
        from_memory=restored("memory") if "memory" in turns[0]["restore"] else None,
        memory_held=median([turn["memory"]["idle_private"] + turn["memory"]["idle_shared"] for turn in turns]),
        memory_peak=median([turn["memory"]["peak_private"] + turn["memory"]["peak_shared"] for turn in turns]),
        memory_private=median([turn["memory"]["peak_private"] for turn in turns]),
        stored_bytes=turns[0]["stored_bytes"],
    )


def quiet(saves: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The saves that others disturbed little; where these are too few, the least disturbed ones."""
    ordered = sorted(saves, key=lambda save: save["foreign_cores"])
    found = [save for save in ordered if save["foreign_cores"] <= FOREIGN_CORES_MAX]
    return found if len(found) >= SAVES_MIN else ordered[:SAVES_MIN]


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, by resampling; always the same for the same samples."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000]
