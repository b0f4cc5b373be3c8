"""What ckptd sets out to reach, each as a ratio within one run, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.subjects import FLOOR, OURS, OURS_EAGER, OVERLAPPED_FLOOR
from bench.summary import Figures

MIB = 2**20
PER_TENSOR_SECONDS = 5e-6


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal and what was measured."""

    what: str
    limit: float
    measured: float
    unit: str
    at_most: bool = True
    """Whether less is better."""

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def goals(figures: Mapping[str, Figures], tensors: int) -> list[Goal]:
    """Those that this run can tell about: ckptd and the floors have to be in it."""
    if not {FLOOR, OVERLAPPED_FLOOR, OURS, OURS_EAGER} <= figures.keys():
        return []
    ours, eager, overlapped = (figures[name] for name in (OURS, OURS_EAGER, OVERLAPPED_FLOOR))
    peers = [found for name, found in figures.items() if name not in (FLOOR, OVERLAPPED_FLOOR, OURS, OURS_EAGER)]
    stall_limit = 3e-3 + 0.03 * ours.memcpy + PER_TENSOR_SECONDS * tensors
    bare_durable = max(ours.memcpy, ours.direct_write)
    found = [
        Goal("stall, not overlapped", 1.15, eager.stall_in_memcpys, "memcpys"),
        Goal("stall, overlapped", stall_limit * 1e3, ours.stall * 1e3, "ms"),
        Goal("first save, stall, not overlapped", 1.3, eager.first_stall / eager.stall, "of a later one"),
        Goal("first save, durable", 1.3, ours.first_durable / ours.durable, "of a later one"),
        Goal("lost above a bare overlapped copy", 0.02, ours.lost - overlapped.lost, "s"),
        Goal("durable", 1.2, ours.durable / bare_durable, "of the larger of memcpy and bare write"),
        Goal("daemon's processor time", 0.25, ours.other_cpu_per_gb, "s/GB"),
        Goal("restore, cold", 0.8, ours.direct_read / ours.cold, "of a bare read's rate", at_most=False),
        Goal("memory above the arena", 96, ours.memory_private / MIB, "MiB"),
    ]
    if ours.from_memory is not None:
        found.append(
            Goal("restore from memory", 0.8, ours.memcpy / ours.from_memory, "of memcpy's rate", at_most=False)
        )
    if tensors >= 10_000:
        per_tensor = (eager.stall - eager.memcpy) / tensors
        found.append(Goal("per tensor, above memcpy", 5, per_tensor * 1e6, "µs"))
    if peers:
        best = min(peers, key=lambda peer: peer.lost)
        found += [
            Goal(f"lost, against the best peer ({best.name})", 0.4, ours.lost / best.lost, "of its"),
            Goal("durable, against the best peer", 1, ours.durable / min(peer.durable for peer in peers), "of its"),
            Goal("restore, cold, against the best peer", 1, ours.cold / min(peer.cold for peer in peers), "of its"),
        ]
    return found
