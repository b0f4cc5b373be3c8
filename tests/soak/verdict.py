"""Whether a soak was as it has to be: flat, bounded, and every policy of back-pressure as its run has asked for."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.limits import KIB, MIB
from tests.soak.holdings import Course
from tests.soak.soak import PLANS, SLOTS, STATED_BUDGET_BYTES, Outcome, Plan, Soak

DAEMON_GROWTH_BYTES_MAX = 24 * MIB
CLIENTS_GROWTH_BYTES_MAX = 40 * MIB
"""Of all clients together."""
RECORD_BYTES_MAX = 256 * KIB
"""Of each slot, beside the state and its slack: the snapshot's record, and what is rounded up to pages."""
DAEMON_SPREAD = 12
"""Descriptors and threads that come and go."""
FILES_OF_A_SAVE_MAX = 4
"""Written at the same time: a shard, and small records of it and of the checkpoint."""


def problems_of(soak: Soak) -> list[str]:
    """In words; none is none."""
    return [*_memory(soak), *_flat(soak), *_left_over(soak), *_policies(soak)]


def _memory(soak: Soak) -> Iterator[str]:
    peak = soak.daemon.peak()
    if peak.shared_bytes > soak.arenas_bytes + soak.pages_bytes + soak.ranks * SLOTS * RECORD_BYTES_MAX:
        yield f"shared memory of {peak.shared_bytes} bytes, where {soak.arenas_bytes + soak.pages_bytes} are stated"
    if peak.shared_bytes + peak.private_bytes > soak.arenas_bytes + STATED_BUDGET_BYTES:
        yield f"the daemon took {peak}, where {soak.arenas_bytes + STATED_BUDGET_BYTES} bytes are stated"


def _flat(soak: Soak) -> Iterator[str]:
    courses: tuple[tuple[str, Course, int, int], ...] = (
        ("daemon", soak.daemon, DAEMON_GROWTH_BYTES_MAX, DAEMON_SPREAD),
        ("clients", soak.clients, CLIENTS_GROWTH_BYTES_MAX, soak.ranks),
    )
    for name, course, growth_bytes_max, spread in courses:
        before, after = course.before_and_after()
        if after.private_bytes > before.private_bytes + growth_bytes_max:
            yield f"{name}: grew from {before} to {after}"
        if after.shared_bytes > before.shared_bytes + soak.pages_bytes:  # the rings fill up; arenas are of one size
            yield f"{name}: more shared memory: from {before} to {after}"
        if after.descriptors > before.descriptors + spread or after.threads > before.threads + spread:
            yield f"{name}: more descriptors or threads: from {before} to {after}"


def _left_over(soak: Soak) -> Iterator[str]:
    ranks = soak.ranks // len(PLANS)
    if max(soak.uploads) > ranks:
        yield f"{max(soak.uploads)} uploads at once by {ranks} ranks"
    if max(soak.temporaries) > FILES_OF_A_SAVE_MAX * soak.ranks:
        yield f"{max(soak.temporaries)} temporary files at once"


def _policies(soak: Soak) -> Iterator[str]:
    for plan in PLANS:
        outcome = soak.outcomes[plan.name]
        half = soak.commits[len(soak.commits) // 2 - 1][plan.name]
        if not 0 < half < soak.commits[-1][plan.name]:
            yield f"{plan.name}: commits do not keep coming: {half} in the first half: {outcome}"
        yield from (f"{plan.name}: {problem}: {outcome}" for problem in _policy(plan, outcome))


def _policy(plan: Plan, outcome: Outcome) -> Iterator[str]:
    failed = {kind for kind in outcome.saves if kind != "committed"}
    if plan.on_full == "wait" and plan.max_wait > 1:
        if failed:
            yield "a save failed where there was all the time to wait"
        if not outcome.waited:
            yield "no save waited, so nothing was tried"
        return
    if not outcome.refused:
        yield "no save found all slots full, so nothing was tried"
    if plan.on_full == "fail" and "SaveError" not in failed:
        yield "no save failed"
    if plan.on_full != "fail" and failed - {"SaveSkipped"}:
        yield "a save failed that was to be skipped"
