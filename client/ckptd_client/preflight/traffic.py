"""Sums over some ranks, with a known answer: whether they reach each other, how fast, and how their clocks differ."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ckptd.errors import first_line
from ckptd.health.report import Pair
from ckptd_client.preflight.party import Deadline, Party

TRANSFERS = 4
CLOCK_ROUNDS = 5
PERIOD = 251
"""Of the pattern that is summed: a prime, so that it meets no power of two."""
ERROR_CHARACTERS_MAX = 300

# A collective that fails is to raise here, not to end the process.
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a group of ranks has measured."""

    bytes_per_second: float
    skews_seconds: tuple[float, ...]
    """Each member's clock less this rank's, to within the time that a message takes."""


def meet(
    party: Party, pair: tuple[int, int], topic: str, *, device: torch.device, size_bytes: int, seconds: float
) -> Pair:
    """Send to the other rank of a pair, and receive. ``seconds``: for all of it. What goes wrong is in the answer."""
    deadline = Deadline(seconds)
    party.say(topic)
    other = pair[0] if party.rank == pair[1] else pair[1]
    if other in party.silent or not party.wait([f"{topic}/{other}"], deadline.left_seconds):
        return Pair(ranks=pair, outcome="absent", error=f"rank {other} did not come")
    store = PrefixStore(f"{topic}/group", party.store)
    try:
        found = exercise(store, pair.index(party.rank), 2, device=device, size_bytes=size_bytes, deadline=deadline)
    except (RuntimeError, ValueError) as error:  # what torch raises, in all its forms
        return Pair(ranks=pair, outcome="failed", error=f"rank {party.rank}: {shortened(error)}")
    skew = found.skews_seconds[1] - found.skews_seconds[0]
    return Pair(ranks=pair, outcome="well", bytes_per_second=found.bytes_per_second, skew_seconds=skew)


def exercise(
    store: Store, place: int, members: int, *, device: torch.device, size_bytes: int, deadline: Deadline
) -> Traffic:
    """As member ``place`` of a group of its own. Raises what torch does, and :class:`ValueError` for a wrong sum."""
    span = timedelta(seconds=deadline.left_seconds)
    gpu = device if device.type == "cuda" else None
    try:
        dist.init_process_group(
            "nccl" if gpu else "gloo", store=store, rank=place, world_size=members, timeout=span, device_id=gpu
        )
        pattern = torch.arange(max(size_bytes // 4, 1), device=device, dtype=torch.float32).remainder_(PERIOD)
        _sum(pattern, place, members)  # connections are made by the first
        began = time.perf_counter()
        for _ in range(TRANSFERS):
            _sum(pattern, place, members)
        rate = TRANSFERS * pattern.nbytes / (time.perf_counter() - began)
        return Traffic(rate, _skews(members, device))
    finally:
        _leave()


def _sum(pattern: torch.Tensor, place: int, members: int) -> None:
    mine = pattern * (place + 1)
    dist.all_reduce(mine)  # pyright: ignore[reportUnknownMemberType]
    # Whole numbers below 2**24: the sum is exact, in whichever order.
    if not torch.equal(mine, pattern * (members * (members + 1) // 2)):
        wrong = int((mine != pattern * (members * (members + 1) // 2)).sum())
        raise ValueError(f"a sum over {members} ranks came out wrong in {wrong} of {mine.numel()} places")


def _skews(members: int, device: torch.device) -> tuple[float, ...]:
    """By the exchange that took least time: each clock was read at some moment of it."""
    best: tuple[float, tuple[float, ...]] | None = None
    for _ in range(CLOCK_ROUNDS):
        here = torch.tensor([time.time()], dtype=torch.float64, device=device)
        clocks = [torch.zeros_like(here) for _ in range(members)]
        began = time.perf_counter()
        dist.all_gather(clocks, here)  # pyright: ignore[reportUnknownMemberType]
        read = tuple((clock - here).item() for clock in clocks)
        took = time.perf_counter() - began
        if best is None or took < best[0]:
            best = (took, read)
    assert best is not None
    return best[1]


def _leave() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    # Groups find each other by a count that torch sets back only when one is destroyed: after one that could not be
    # made, this rank would look for its next partner, who is well, under another name.
    dist.distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]


def shortened(error: BaseException) -> str:
    """The first line of what torch has to say, which may be a page."""
    return first_line(error).strip().splitlines()[0][:ERROR_CHARACTERS_MAX]
