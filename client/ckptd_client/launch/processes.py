"""The processes of a group, with all that they have started: how they ended, and their end, awaited."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence

import psutil

from ckptd.errors import ResourceError

PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 30.0
"""How long a process may take to go after SIGKILL."""
LOOK_SECONDS = 0.02
DAEMON = "ckptd.daemon"


def adopt_orphans() -> None:
    """From now on, whoever below this process loses its parent becomes its child: nothing gets out of sight by
    detaching itself."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def exit_of(pid: int) -> int | None:
    """The exit code of a child that has ended, a signal's negative; ``None`` while it lives. Does not reap it. Of one
    that somebody else has reaped, 0."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def in_words(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def all_in_words(ended: Sequence[tuple[int, int | None]]) -> str:
    """How workers ended that did not end well; by local rank, the first few."""
    return "; ".join([f"local rank {rank} {in_words(code)}" for rank, code in ended if code][:4])


def children() -> frozenset[psutil.Process]:
    """What this process has started, and lives."""
    return frozenset(psutil.Process().children())


def end_all(workers: Iterable[int], spared: Collection[psutil.Process]) -> int:
    """SIGKILL to all that this process or its children have started, but for daemons, those ``spared``, and what is
    theirs; returns when they are gone. ``workers``: children that somebody else will reap. Returns how many were alive.

    Raises :class:`ResourceError`, naming those that do not go: they may wait in the kernel, and hold a device.
    """
    own = frozenset(workers)
    until = time.monotonic() + END_SECONDS
    found: set[psutil.Process] = set()
    while left := _living(own, spared):
        found |= set(left)
        if time.monotonic() > until:
            named = ", ".join(f"{process.pid} ({_state(process)})" for process in left[:8])
            raise ResourceError(
                f"processes do not end: {named}", hint="they wait in the kernel, for a device or a disk; see `ps`"
            )
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(LOOK_SECONDS)
    return len(found)


def _living(workers: frozenset[int], spared: Collection[psutil.Process]) -> list[psutil.Process]:
    """Below this process. Orphans that have ended are reaped."""
    living: list[psutil.Process] = []
    others: set[int] = set()
    for process in psutil.Process().children(recursive=True):  # a parent comes before its children
        try:
            if process in spared or process.ppid() in others or DAEMON in process.cmdline():
                others.add(process.pid)
            elif process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.ppid() == os.getpid() and process.pid not in workers:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        except psutil.Error:
            continue
    return living


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return "ended"
