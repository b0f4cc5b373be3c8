"""Which node is bad: from what all ranks have found to names. Values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from ckptd.exits import Exit
from ckptd.health.report import BadNode, Check, Member, Outcome, Pair, Report

SLOW_FRACTION = 1 / 4
"""Of what is usual among the ranks; what is below is slow. Healthy ones differ by far less, even where they share a
machine with others."""
COMPARED_MIN = 3
"""Of two that differ, nobody can say which is the slow one."""
SKEW_SECONDS_MAX = 5.0

WORSE: tuple[Outcome, ...] = ("well", "absent", "failed")

Reasons = dict[int, list[str]]


def judge(world: int, nodes: Mapping[int, str], members: Sequence[Member]) -> Report:
    """The report. ``nodes``: of the ranks that said where they run, whether or not they came to the end."""
    pairs = merged(pair for member in members for pair in member.pairs)
    present = {member.rank for member in members}
    reasons: Reasons = {rank: [] for rank in range(world)}
    faults: list[str] = []
    for rank in sorted(reasons.keys() - present):
        reasons[rank].append("did not answer" if rank in nodes else "never came")
    _judge_checks(members, reasons, faults)
    met = [pair for pair in pairs if present.issuperset(pair.ranks)]
    _judge_traffic(met, reasons, faults)
    well = [pair for pair in met if pair.outcome == "well"]
    _judge_clocks(well, reasons, faults)
    _judge_rates(well, reasons)
    warnings = [*_warned(members), *_slow_checks(members, reasons)]
    bad = tuple(_by_node(reasons, nodes))
    return Report(
        world=world,
        exit_code=Exit.BAD_NODE if bad else Exit.RESOURCES if faults else Exit.WELL,
        bad_nodes=bad,
        faults=tuple(faults),
        warnings=tuple(warnings),
        members=tuple(members),
        pairs=pairs,
    )


def merged(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """One record for each pair: the worse outcome, the lower rate, what both said of the error."""
    found: dict[tuple[int, int], Pair] = {}
    for pair in pairs:
        before = found.get(pair.ranks, pair)
        found[pair.ranks] = Pair(
            ranks=pair.ranks,
            outcome=max((before.outcome, pair.outcome), key=WORSE.index),
            bytes_per_second=min(before.bytes_per_second, pair.bytes_per_second),
            skew_seconds=max(before.skew_seconds, pair.skew_seconds, key=abs),
            error="; ".join(dict.fromkeys(error for error in (before.error, pair.error) if error)),
        )
    return tuple(found[ranks] for ranks in sorted(found))


def _judge_checks(members: Sequence[Member], reasons: Reasons, faults: list[str]) -> None:
    for member in members:
        for check in member.checks:
            if check.level != "error":
                continue
            text = _said(check)
            if not check.shared or _passed_elsewhere(check, members):
                reasons[member.rank].append(text)
            elif text not in faults:
                faults.append(text)


def _said(check: Check) -> str:
    return f"{check.subject}: {check.message}" if check.place == "host" else f"{check.place}: {check.message}"


def _passed_elsewhere(failed: Check, members: Sequence[Member]) -> bool:
    return any(
        check.subject == failed.subject and check.level != "error" for member in members for check in member.checks
    )


def _judge_traffic(met: Sequence[Pair], reasons: Reasons, faults: list[str]) -> None:
    """Who failed with all that it met, while others got through."""
    through = {rank for pair in met if pair.outcome == "well" for rank in pair.ranks}
    for rank, own in _of_each(met):
        if rank in through:
            continue
        if through:
            reasons[rank].append(f"reached none of ranks {_list(own, rank)}: {own[0].error}")
    if met and not through:
        faults.append(f"no two ranks reach each other: {met[0].error}")


def _judge_clocks(well: Sequence[Pair], reasons: Reasons, faults: list[str]) -> None:
    """Whose clock differs from all others', while others agree."""
    off = {pair.ranks for pair in well if abs(pair.skew_seconds) > SKEW_SECONDS_MAX}
    agreed = {rank for pair in well if pair.ranks not in off for rank in pair.ranks}
    for rank, own in _of_each([pair for pair in well if pair.ranks in off]):
        if rank in agreed:
            continue
        skew = own[0].skew_seconds if rank == own[0].ranks[1] else -own[0].skew_seconds
        text = f"its clock differs by {skew:+.1f} s"
        if agreed:
            reasons[rank].append(f"{text} from that of ranks {_list(own, rank)}")
        elif rank == own[0].ranks[1]:
            faults.append(f"rank {rank}: {text} from rank {own[0].ranks[0]}'s, and nobody can say whose is wrong")


def _judge_rates(well: Sequence[Pair], reasons: Reasons) -> None:
    """Who is slow with everybody. A good rank has been fast with at least one other."""
    best = {rank: max(pair.bytes_per_second for pair in own) for rank, own in _of_each(well)}
    for rank, usual in _slow(best).items():
        text = f"slow with all it met: at best {best[rank] / 1e6:.1f} MB/s, where {usual / 1e6:.1f} are usual"
        reasons[rank].append(text)


def _slow(rates: Mapping[int, float]) -> dict[int, float]:
    """Who is below :data:`SLOW_FRACTION` of the median, and the median."""
    if len(rates) < COMPARED_MIN:
        return {}
    usual = median(rates.values())
    return {rank: usual for rank, rate in rates.items() if rate < SLOW_FRACTION * usual}


def _slow_checks(members: Sequence[Member], reasons: Reasons) -> Iterator[str]:
    """Rates that one rank measured by itself: of a GPU they make it bad; of processors and stores, which others use
    too, they are warnings."""
    measured: dict[tuple[str, str], dict[int, float]] = {}
    for member in members:
        for check in member.checks:
            for name, rate in check.figures.items():
                if name.endswith("_per_second"):
                    of_gpu = "GPU" if check.place != "host" else "host"
                    rates = measured.setdefault((of_gpu, f"{check.subject}, {name}"), {})
                    rates[member.rank] = min(rate, rates.get(member.rank, rate))
    for (where, what), rates in measured.items():
        for rank, usual in _slow(rates).items():
            text = f"slow: {what} {rates[rank]:.3g}, where {usual:.3g} is usual"
            if where == "GPU":
                reasons[rank].append(text)
            else:
                yield f"rank {rank}: {text}"


def _warned(members: Sequence[Member]) -> Iterator[str]:
    for member in members:
        yield from (f"rank {member.rank}: {_said(check)}" for check in member.checks if check.level == "warning")


def _of_each(pairs: Sequence[Pair]) -> Iterator[tuple[int, list[Pair]]]:
    for rank in sorted({rank for pair in pairs for rank in pair.ranks}):
        yield rank, [pair for pair in pairs if rank in pair.ranks]


def _list(pairs: Sequence[Pair], rank: int) -> str:
    return ", ".join(str(other) for pair in pairs for other in pair.ranks if other != rank)


def _by_node(reasons: Reasons, nodes: Mapping[int, str]) -> Iterator[BadNode]:
    found: dict[str, list[int]] = {}
    for rank, why in reasons.items():
        if why:
            found.setdefault(nodes.get(rank) or f"\0{rank}", []).append(rank)
    for node, ranks in found.items():
        yield BadNode(
            node="" if node.startswith("\0") else node,
            ranks=tuple(ranks),
            reasons=tuple(f"rank {rank}: {text}" for rank in ranks for text in reasons[rank]),
        )
