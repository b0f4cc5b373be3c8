"""What the daemon says of itself: a dict of plain values, without secrets, that fits into one message."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from ckptd import __version__
from ckptd.daemon.arenas import HeldArena
from ckptd.daemon.link import Link
from ckptd.daemon.owner import Owner
from ckptd.daemon.retiring import Pass
from ckptd.daemon.save import Failure, Save
from ckptd.daemon.watch.watchdog import Watchdog
from ckptd.limits import KIB, MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from ckptd.daemon.service import Service

LISTED = (64, 16, 4, 1)
"""Sessions, saves and arenas that are listed each, as many as fit into the message; the rest is counted."""
TEXT_MAX = 300


def status_of(service: Service) -> dict[str, Any]:
    """See ``ckptd status --json``."""
    for listed in LISTED[:-1]:
        status = _status(service, listed)
        if len(msgspec.json.encode(status)) < MESSAGE_BYTES_MAX - KIB:
            return status
    return _status(service, LISTED[-1])


def _status(service: Service, listed: int) -> dict[str, Any]:
    saves, arenas, tally = service.saves.under_way(), service.arenas.all(), service.saves.tally
    owners = [session.owner for session in service.sessions if session.owner is not None]
    owners.sort(key=lambda owner: owner.seat)

    def shown(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
        found = list(entries)
        return {"count": len(found), "listed": found[:listed]}

    return {
        "version": __version__,
        "pid": os.getpid(),
        "socket": str(service.settings.socket),
        "uptime_seconds": round(time.monotonic() - service.began_seconds, 3),
        "draining": service.saves.draining,
        "budgets": service.settings.budgets.shown(),
        "threads": _threads(listed),
        "sessions": shown(_session(owner, service.watch) for owner in owners),
        "watch": service.watch.status(listed),
        "saves": shown(_save(save) for save in sorted(saves, key=lambda save: save.began_seconds)),
        "committed": {url[:TEXT_MAX]: str(version) for url, version in list(tally.committed.items())[-listed:]},
        "failures": [_failure(failure) for failure in tally.failures],
        "stores": shown(
            {"run": url[:TEXT_MAX], "level": finding.level, "subject": finding.subject, "message": finding.message}
            for url, findings in service.stores.findings.items()
            for finding in findings
        ),
        "tiers": shown(map(_tier, service.replication.links)),
        "retention": shown(_pass(url, made) for url, made in service.replication.retiring.passes.items()),
        "logs": shown(service.logs.status()),
        "arenas": shown(map(_arena, arenas)),
        "health": service.monitor.status(listed),
        "arena_bytes": service.arenas.size_bytes,
        "verifying": _verifying(service),
        "counts": {"retired": 0, "retiring_failed": 0, **tally.counts},
    }


def _threads(listed: int) -> dict[str, int]:
    """How many there are, by what they are for; the most numerous first."""
    counts = Counter(thread.name.rpartition("_")[0] or thread.name for thread in threading.enumerate())
    return {name[:TEXT_MAX]: count for name, count in counts.most_common(listed)}


def _session(owner: Owner, watch: Watchdog) -> dict[str, Any]:
    last, limit = watch.last(owner), watch.limit_seconds(owner)
    return {
        "run": owner.seat.url[:TEXT_MAX],
        "rank": owner.seat.rank,
        "world": owner.world,
        "launch": owner.launch[:TEXT_MAX],
        "pid": owner.process.pid,
        "beat": None
        if last is None
        else {
            "step": last.step,
            "phase": last.phase.name.lower(),
            "age_seconds": round((time.monotonic_ns() - last.monotonic_ns) / 1e9, 3),
            "limit_seconds": None if limit is None else round(limit, 3),
        },
    }


def _save(save: Save) -> dict[str, Any]:
    now = time.monotonic()
    source = save.source
    sent = source.sent_bytes if source else 0
    seconds = now - save.began_seconds
    return {
        "run": save.owner.seat.url[:TEXT_MAX],
        "rank": save.owner.seat.rank,
        "version": str(save.version),
        "stage": save.stage,
        "bytes": save.fill.record.shard_bytes,
        "bytes_done": sent,
        "bytes_per_second": round(sent / seconds) if seconds > 0 else 0,
        "seconds": round(seconds, 3),
        "progress_age_seconds": round(now - (source.progress_seconds if source else save.began_seconds), 3),
    }


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "unix_seconds": failure.unix_seconds,
        "run": failure.seat.url[:TEXT_MAX],
        "rank": failure.seat.rank,
        "version": str(failure.version),
        "stage": failure.stage,
        "error": failure.error[: 3 * TEXT_MAX],
    }


def _tier(link: Link) -> dict[str, Any]:
    newest = link.there
    return {
        "run": link.owner.seat.url[:TEXT_MAX],
        "tier": link.target.backend.url[:TEXT_MAX],
        "state": link.state,
        "committed": None if newest is None else str(newest),
        "behind_steps": link.near.step - (newest.step if newest else 0) if link.near and link.behind_since else 0,
        "behind_seconds": round(time.time() - link.behind_since, 3) if link.behind_since else 0,
        "copying": None if link.version is None else str(link.version),
        "bytes": link.bytes,
        "bytes_done": min(link.bytes_done, link.bytes),
        "failures": link.failures,
        "error": link.error[: 3 * TEXT_MAX],
    }


def _verifying(service: Service) -> dict[str, str] | None:
    current = service.verifying.current
    return None if current is None else {"tier": current[0][:TEXT_MAX], "version": str(current[1])}


def _pass(url: str, made: Pass) -> dict[str, Any]:
    outcome = made.outcome
    return {
        "tier": url[:TEXT_MAX],
        "unix_seconds": made.unix_seconds,
        "kept": outcome.kept,
        "deleted": len(outcome.deleted),
        "waiting": len(outcome.waiting),
        "failed": len(outcome.failed),
        "error": made.error[: 3 * TEXT_MAX],
    }


def _arena(held: HeldArena) -> dict[str, Any]:
    return {
        "id": held.arena.id,
        "run": held.owner.seat.url[:TEXT_MAX],
        "rank": held.owner.seat.rank,
        "bytes": held.arena.shape.size_bytes,
        "slots": [record.state.name.lower() for _, record in held.records()],
        "owner_pid": held.owner.process.pid,
        "owner_alive": not held.owner.dead,
    }
