"""What all ranks decide together: which checkpoints are tried, what their votes add up to, and the words for it.

Each function here runs on rank 0, for all, or gives the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ckptd.checkpoint.selectors import Selector, spoken
from ckptd.errors import NEAR_MAX
from ckptd.format.keys import Version, parse_version
from ckptd.wire.messages import SnapshotOffer
from ckptd_client.nearest import candidates, run_in
from ckptd_client.roots import Root

CANDIDATES_MAX = 16
"""So many checkpoints, newest first, are tried before a restore gives up."""

NOTICES_MAX = 16
"""So many reasons, of all ranks together, are given why memory was not used."""


def offered(offers: Sequence[SnapshotOffer], wanted: Selector) -> list[list[Any]]:
    """What a rank tells of the snapshots that its daemon holds: not of one that was saved for a post-mortem, unless it
    is asked for by name."""
    return [
        [str(Version(o.step, o.generation)), o.run, o.world, o.rank, o.unhealthy]
        for o in offers
        if not o.debug or wanted != "latest"
    ]


async def usable(roots: Sequence[Root], held: list[list[list[Any]]]) -> list[Any]:
    """The id of the run that lies in the tiers now, empty where there is none; the snapshots of it that are in
    memory for every rank that took one; those of which some are missing, with that in words; and those that are not
    healthy. What is left of a run that was deleted counts for nothing."""
    run = await run_in(roots)
    found: dict[str, set[int]] = {}
    worlds: dict[str, int] = {}
    unhealthy: set[str] = set()
    for version, run_id, world, rank, bad in (offer for of_rank in held for offer in of_rank):
        if run and run_id == run:
            found.setdefault(version, set()).add(rank)
            worlds[version] = world
            if bad:
                unhealthy.add(version)
    whole = sorted(version for version, ranks in found.items() if len(ranks) == worlds[version])
    some = sorted(found.keys() - whole, reverse=True)
    return [
        run,
        whole,
        [[version, unfinished(version, found[version], worlds[version])] for version in some],
        sorted(unhealthy),
    ]


async def listed(
    roots: Sequence[Root], wanted: Selector, in_memory: Sequence[str], unhealthy: Sequence[str]
) -> list[list[str]]:
    """The checkpoints to be tried for what is wanted, in order, and what is to be said of their order; see
    :func:`ckptd_client.nearest.candidates`."""
    held, bad = [list(map(parse_version, texts)) for texts in (in_memory, unhealthy)]
    found, said = await candidates(roots, wanted, held, bad)
    return [[str(version) for version in found[:CANDIDATES_MAX]], said[:NOTICES_MAX]]


def all_names(of_ranks: list[list[str]]) -> list[str]:
    """The names that any rank has."""
    return sorted({name for names in of_ranks for name in names})


def is_newer(text: str, candidates: Sequence[str]) -> bool:
    """Whether a version would have come before the first of the candidates."""
    version = parse_version(text)
    return text not in candidates and all(
        (version.generation, version.step) > (other.generation, other.step) for other in map(parse_version, candidates)
    )


def judged(votes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the votes of all ranks, in their order, add up to. Only what no rank expects is unexpected,
    and a pattern stands for nothing where it does so on every rank."""
    everywhere = set(votes[0]["unexpected"]).intersection(*(vote["unexpected"] for vote in votes[1:]))
    return {
        "refusals": [vote["refusal"] for vote in votes if vote["refusal"] is not None],
        "unexpected": [name for name in votes[0]["unexpected"] if name in everywhere],
        "unmatched": {
            pattern: list(dict.fromkeys(name for vote in votes for name in vote["unmatched"][pattern]))[:NEAR_MAX]
            for pattern in votes[0]["unmatched"]
            if all(pattern in vote["unmatched"] for vote in votes)
        },
        "everything": all(vote["everything"] for vote in votes),
        "sources": [vote["source"] for vote in votes],
        "unused": [reason for vote in votes for reason in vote["unused"]][:NOTICES_MAX],
    }


def in_words(version: Version, saved_world: int, sources: Sequence[str]) -> str:
    """In words, such as ``step 20 (generation 3) of 4 ranks: memory on ranks 0-2, storage on rank 3``."""
    spans: list[str] = []
    for source, group in groupby(enumerate(sources), key=lambda item: item[1]):
        ranks = [rank for rank, _ in group]
        spans.append(f"{source} on " + (f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"))
    return f"step {spoken(version)}, saved by {saved_world} rank{'s' if saved_world != 1 else ''}: {', '.join(spans)}"


def unfinished(version: str, found: set[int], world: int) -> str:
    """Why nobody can have a step of which only some snapshots were found."""
    missing = next(rank for rank in range(world) if rank not in found)
    step = spoken(parse_version(version))
    there = f"memory has {len(found)} of its {world} snapshots, and none of rank {missing}"
    return f"step {step} was passed over: it is not committed, and {there}"
