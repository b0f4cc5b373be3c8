"""What would go wrong here: this machine's limits, the daemon, and the store of a run. Each check is one finding."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.checkpoint.objects import store_clock, token
from ckptd.checkpoint.run import Run
from ckptd.cli.daemon_call import call
from ckptd.cli.output import counted, size
from ckptd.daemon.budgets import Budgets
from ckptd.daemon.memory import headroom_bytes
from ckptd.daemon.processors import processor_count
from ckptd.errors import AlreadyExists, CkptdError, NoCheckpoint, first_line
from ckptd.format.keys import LEASES
from ckptd.limits import LEASE_SECONDS, MIB, SLOT_SLACK_FRACTION
from ckptd.storage import Backend, Finding, Level, SelfTesting, normal_url
from ckptd.wire.messages import GetStatus, Status

FILES_WANTED = 1024
FILES_NEEDED = 256
"""Fewer are used up by the sockets of a few ranks."""
MEMFD_BYTES = MIB
SKEW_WARNING_SECONDS = 5.0
PROBE = b"ckptd doctor probe\n" * 64
DAEMON_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is going to be run here."""

    state_bytes: int | None
    """One rank's state; ``None``: not known."""
    ranks: int
    slots: int
    keep: int

    @property
    def arena_bytes(self) -> int | None:
        """All arenas of this machine."""
        if self.state_bytes is None:
            return None
        return int(self.state_bytes * (1 + SLOT_SLACK_FRACTION)) * self.slots * self.ranks


def check_machine(wishes: Wishes, socket: Path) -> list[Finding]:
    """Memory, limits of processes, the daemon. Changes nothing."""
    return [*check_host(wishes), _daemon(socket)]


def check_host(wishes: Wishes) -> list[Finding]:
    """Memory and limits of processes. Changes nothing."""
    return [_memory(wishes), _locked_memory(wishes), _processors(), _open_files(), _memfd()]


async def check_store(backend: Backend, probed: Backend, wishes: Wishes) -> list[Finding]:
    """The store: its own self-test, else a probe of ours; then clocks, the run and room. Leaves nothing behind; what
    fails is a finding, and the next check is made all the same.

    ``probed``: where probes are put; ``backend`` itself, unless that would make its root.
    """
    findings = await _self_tested(backend)
    if not findings:
        findings = [
            *await _tried("put and get", _round_trip(probed)),
            *await _tried("conditional put", _conditional_put(probed)),
        ]
    if not any(finding.subject == "clock" for finding in findings):
        findings += await _tried("clock", _clock(probed))
    findings += await _tried("run", _run(backend))
    room = _room(backend, wishes)
    return [*findings, room] if room is not None else findings


def check_root(url: str) -> tuple[str | None, list[Finding]]:
    """Where below which the root is, or would be made: the URL of the nearest folder that is there, for a local root,
    and what is to be said of it; ``None`` where that is no place for probes. Makes nothing. Any other store makes no
    folders."""
    url = normal_url(url)
    if not url.startswith("file://"):
        return url, []
    root = Path(url.removeprefix("file://"))
    there = _nearest(root)
    if there == root:
        return url, []
    if there == Path("/"):
        text = f"{root} does not exist, nor does any folder that it would lie in; the store was not checked"
        hint = "is it spelled as you mean it, and mounted? Else make the folder, and ask again"
        return None, [Finding("error", "root", text, hint)]
    text = f"{root} does not exist: the first save would make it, and the checks below are made in {there}"
    return f"file://{there}", [Finding("warning", "root", text, "is it spelled as you mean it, and mounted?")]


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


async def _self_tested(backend: Backend) -> list[Finding]:
    """Nothing, where the backend has no test of its own."""
    if not isinstance(backend, SelfTesting):
        return []
    return await _tried("self-test", backend.self_test())


def _memory(wishes: Wishes) -> Finding:
    room, needed = headroom_bytes(), wishes.arena_bytes
    figures = f"{size(room)} can still be taken, within the machine's memory and every cgroup's limit"
    if needed is None:
        return Finding("ok", "memory", figures, "give --state-bytes to have it compared")
    wanted = (
        f"{counted(wishes.ranks, 'rank')} with {counted(wishes.slots, 'slot')} need {size(needed)} of shared memory"
    )
    text = f"{wanted}; {figures}"
    if needed <= room:
        return Finding("ok", "memory", text)
    return Finding("error", "memory", text, "use slots=1, raise the limit, or run the daemon in a cgroup of its own")


def _locked_memory(wishes: Wishes) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or (wishes.arena_bytes is not None and soft >= wishes.arena_bytes):
        return Finding("ok", "locked memory", "unlimited" if soft == resource.RLIM_INFINITY else size(soft))
    return Finding(
        "warning",
        "locked memory",
        f"at most {size(soft)} (ulimit -l): pinning the arena for a GPU may be refused, and copies are then slower",
        "raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity",
    )


def _processors() -> Finding:
    usable, there = processor_count(), os.cpu_count() or 1
    budgets = Budgets()
    text = (
        f"{usable:g} of {there} may be used; a daemon takes {counted(budgets.digest_threads_used, 'thread')} for "
        f"digests and up to {budgets.io_threads_used} for each store, unless --digest-threads and --io-threads say "
        "otherwise"
    )
    if usable >= 1:
        return Finding("ok", "processors", text)
    return Finding("warning", "processors", text, "saves will take long: raise the cgroup's cpu.max")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_WANTED:
        return Finding("ok", "open files", f"up to {soft}" if soft != resource.RLIM_INFINITY else "unlimited")
    level: Level = "error" if soft < FILES_NEEDED else "warning"
    return Finding(level, "open files", f"at most {soft} (ulimit -n), and {FILES_WANTED} are wanted", "raise it")


def _memfd() -> Finding:
    try:
        made = os.memfd_create("ckptd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return Finding("error", "shared memory", f"memfd_create does not work here: {error}", "Linux 3.17 or newer")
    try:
        os.posix_fallocate(made, 0, MEMFD_BYTES)
    except OSError as error:
        text = f"{size(MEMFD_BYTES)} of it cannot be had: {error.strerror}"
        return Finding("error", "shared memory", text, "look at ulimit -f and the cgroup's memory.max")
    finally:
        os.close(made)
    return Finding("ok", "shared memory", "memfd, with seals; no mount such as /dev/shm is needed")


def _daemon(socket: Path) -> Finding:
    try:
        status = call(socket, GetStatus(), Status, seconds=DAEMON_SECONDS).status
    except CkptdError as error:
        return Finding("ok", "daemon", f"{error.message}; a client starts one")
    return Finding("ok", "daemon", f"ckptd {status.get('version')} serves {socket}, process {status.get('pid')}")


async def _tried(subject: str, check: Coroutine[Any, Any, Finding | list[Finding]]) -> list[Finding]:
    """What a check finds; that it failed is a finding too."""
    try:
        found = await check
    except CkptdError as error:
        return [Finding("error", subject, error.message, error.hint)]
    except ExceptionGroup as errors:  # probes that could not be removed
        return [Finding("error", subject, first_line(error), getattr(error, "hint", "")) for error in errors.exceptions]
    return found if isinstance(found, list) else [found]


async def _round_trip(backend: Backend) -> Finding:
    key = f"{LEASES}doctor-{token()}.json"
    await backend.put(key, PROBE)
    try:
        same = await backend.get(key, limit_bytes=2 * len(PROBE)) == PROBE
    finally:
        await backend.delete([key])
    if same:
        return Finding("ok", "put and get", f"{backend.url} gives back what was put")
    return Finding(
        "error", "put and get", f"{backend.url} gives back other bytes than were put", "do not use this store"
    )


async def _conditional_put(backend: Backend) -> Finding:
    if not backend.capabilities.put_if_absent:
        return Finding(
            "warning", "conditional put", f"{backend.url} cannot put if absent", "only one writer at a time is safe"
        )
    key = f"{LEASES}doctor-{token()}.json"
    await backend.put(key, PROBE, if_absent=True)
    try:
        await backend.put(key, PROBE[::-1], if_absent=True)
    except AlreadyExists:
        return Finding("ok", "conditional put", "the second of two puts was refused")
    finally:
        await backend.delete([key])
    return Finding(
        "error", "conditional put", f"{backend.url} let two puts of one name win", "only one writer at a time is safe"
    )


async def _clock(backend: Backend) -> Finding:
    before = time.time()
    store = await store_clock(backend)
    skew = max(before - store, store - time.time(), 0.0)
    text = f"this machine and the store differ by {skew:.1f} s"
    # File systems keep coarse times, and some stores whole seconds.
    if skew < SKEW_WARNING_SECONDS:
        return Finding("ok", "clock", text)
    return Finding("error" if skew > LEASE_SECONDS else "warning", "clock", text, "synchronize this machine's clock")


async def _run(backend: Backend) -> Finding:
    try:
        run = await Run.open(backend)
    except NoCheckpoint:
        return Finding("ok", "run", f"{backend.url} holds no run yet")
    line = await run.line()
    newest = f"newest checkpoint {line[0].step}-g{line[0].generation}" if line else "no checkpoint yet"
    return Finding("ok", "run", f"{len(line)} checkpoints on its line, {newest}")


def _room(backend: Backend, wishes: Wishes) -> Finding | None:
    """Room on a local disk for what is kept, and the one being written."""
    if not backend.url.startswith("file://"):
        return None
    folder = _nearest(Path(backend.url.removeprefix("file://")))
    free = shutil.disk_usage(folder).free
    if wishes.state_bytes is None:
        return Finding("ok", "room", f"{size(free)} free at {folder}", "give --state-bytes to have it compared")
    needed = wishes.state_bytes * wishes.ranks * (wishes.keep + 1)
    text = f"{wishes.keep} checkpoints and the one being written need {size(needed)}; {size(free)} free at {folder}"
    if needed <= free:
        return Finding("ok", "room", text)
    return Finding("error", "room", text, "keep fewer, or use another disk")
