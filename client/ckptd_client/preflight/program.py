"""The preflight itself: each rank by itself, then every two, then all that are well; one report for all."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec
import torch
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from ckptd.cli.preflight import Options
from ckptd.errors import ConfigError, DeadlineExceeded
from ckptd.health.report import Check, Member, Pair, Report
from ckptd.health.tournament import rounds
from ckptd.health.verdict import judge
from ckptd_client.preflight.own import STUCK_THREAD, bounded, own_checks, place_on_node
from ckptd_client.preflight.party import Deadline, Party
from ckptd_client.preflight.traffic import exercise, meet, shortened
from ckptd_client.tiers import NODE_VARIABLE

PREFIX = "ckptd-preflight"
VERDICT = "verdict"
PRINTED = "printed"
ALL_RANKS = "all ranks"
GRACE_SECONDS = 5.0
"""Between ranks that wait for the same moment, and for the one that prints."""


def run(options: Options, show: Callable[[Report], None]) -> int:
    """Try this machine, or all of the launcher's world; one rank shows the report. Returns the exit code, the same on
    all ranks that answer. Raises :class:`DeadlineExceeded` where the ranks have no store to meet in."""
    if options.single or "RANK" not in os.environ:
        report = alone(options)
        show(report)
    else:
        try:
            party = _party(options.roll_call_seconds)
            report = together(options, party)
            _show_once(report, party, show)
        except DistError as error:
            raise DeadlineExceeded(
                f"the ranks have no store to meet in: {shortened(error)}",
                hint="MASTER_ADDR and MASTER_PORT lead to it, as torchrun sets them; or give --single",
            ) from None
    sys.stdout.flush()
    if any(thread.name == STUCK_THREAD for thread in threading.enumerate()):
        os._exit(report.exit_code)  # a call into a driver that never returns would keep the process
    return report.exit_code


def _party(seconds: float) -> Party:
    """Through the store that torchrun, or whoever set MASTER_ADDR, has for this start."""
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds))))
    except ValueError as error:
        raise ConfigError(f"the launcher does not say how the ranks meet: {error}", hint="or give --single") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Party(PrefixStore(f"{PREFIX}/{attempt}", store), rank, world)


def _show_once(report: Report, party: Party, show: Callable[[Report], None]) -> None:
    """By the first rank that came to the end. The others stay until then: a launcher ends all when one ends badly."""
    if party.rank == min((member.rank for member in report.members), default=party.rank):
        show(report)
        sys.stdout.flush()
        party.store.set(PRINTED, "")
    else:
        party.wait([PRINTED], GRACE_SECONDS)


def alone(options: Options) -> Report:
    """One machine by itself: its host, its store, all of its GPUs."""
    node = _node()
    checks = bounded(own_checks(options, 0, 1), options.checks_seconds)
    return judge(1, {0: node}, [Member(rank=0, node=node, checks=tuple(checks))])


def together(options: Options, party: Party) -> Report:
    """With all ranks of a world. Nobody is waited for twice, and no single rank is needed."""
    party.say("hello", _node())
    nodes = {rank: name.decode() for rank, name in party.hear("hello", options.roll_call_seconds).items()}
    local_rank, local_world = place_on_node()
    deadline = Deadline(options.checks_seconds + GRACE_SECONDS)
    checks = bounded(own_checks(options, local_rank, local_world), options.checks_seconds)
    party.say("checked")
    party.hear("checked", deadline.left_seconds)
    device = torch.device("cuda", local_rank) if local_rank < torch.cuda.device_count() else torch.device("cpu")
    pairs = _pairs(options, party, device)
    me = Member(rank=party.rank, node=_node(), checks=tuple(checks), pairs=tuple(pairs))
    members = _heard(party, "paired", me)
    if not party.agreed(VERDICT):
        check = _all_ranks(options, party, judge(party.world, nodes, members), device)
        if check is not None:
            me = msgspec.structs.replace(me, checks=(*me.checks, check))
        members = _heard(party, "done", me, 2 * options.pair_seconds)
    report = judge(party.world, nodes, members)
    return msgspec.json.decode(party.agree(VERDICT, _json(report)), type=Report)


def _pairs(options: Options, party: Party, device: torch.device) -> Iterator[Pair]:
    """This rank's meetings. All rounds begin together, or a rank that was held up by a bad one would be late for a
    good one."""
    for number, pairs in enumerate(rounds(party.world)):
        if party.agreed(VERDICT):
            return  # this rank was away for so long that the others have decided
        deadline = Deadline(2 * options.pair_seconds + 1)
        own = next((pair for pair in pairs if party.rank in pair), None)
        if own is not None:
            yield meet(
                party,
                own,
                f"round/{number}",
                device=device,
                size_bytes=options.traffic_bytes,
                seconds=options.pair_seconds,
            )
        party.say(f"round/{number}/over")
        party.hear(f"round/{number}/over", deadline.left_seconds)


def _heard(party: Party, topic: str, me: Member, seconds: float = 0.0) -> list[Member]:
    party.say(topic, _json(me))
    said = party.hear(topic, seconds + GRACE_SECONDS)
    return [msgspec.json.decode(said[rank], type=Member) for rank in sorted(said)]


def _all_ranks(options: Options, party: Party, so_far: Report, device: torch.device) -> Check | None:
    """A sum over all that are well so far; ``None`` where this rank is not, or is alone with that."""
    bad = {rank for node in so_far.bad_nodes for rank in node.ranks}
    well = [member.rank for member in so_far.members if member.rank not in bad]
    roster = msgspec.json.decode(party.agree("roster", _json(well)), type=list[int])
    if party.rank not in roster or len(roster) < 2:
        return None
    store = PrefixStore("everybody", party.store)
    try:
        found = exercise(
            store,
            roster.index(party.rank),
            len(roster),
            device=device,
            size_bytes=options.traffic_bytes,
            deadline=Deadline(options.pair_seconds),
        )
    except (RuntimeError, ValueError) as error:
        return Check(level="error", subject=ALL_RANKS, message=shortened(error), shared=True)
    text = f"a sum over {len(roster)} ranks is right, {found.bytes_per_second / 1e6:.0f} MB/s"
    return Check(level="ok", subject=ALL_RANKS, message=text, shared=True)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _node() -> str:
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()
