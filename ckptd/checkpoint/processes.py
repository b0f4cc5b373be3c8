"""Who a process is, so that others on the same machine see at once that it has died."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_STATE_FIELD, _THREADS_FIELD, _START_FIELD = 0, 17, 19
"""Of ``/proc/PID/stat``, counted behind the command's closing parenthesis; the start time is in ticks since boot."""


def holder_here(doing: str) -> str:
    """This process, for the people whom its lease keeps from something, and what it is doing."""
    return f"{socket.gethostname()}, process {os.getpid()}, {doing}"


def own_identity() -> str:
    """This process, in words that no other process of any machine has; empty where the kernel does not say."""
    try:
        return f"{_here()}:{os.getpid()}:{started(os.getpid())}"
    except OSError:
        return ""


def is_gone(identity: str) -> bool:
    """Whether the process is known to have ended, though its parent may not have noticed. ``False`` where it cannot be
    seen from here."""
    here, _, process = identity.partition(":")
    pid, _, began = process.partition(":")
    try:
        if here != _here() or not pid.isdecimal():
            return False
        fields = _fields(int(pid))
        # In a container whose first process reaps nobody, a killed trainer stays a zombie for good. One whose first
        # thread alone has ended looks the same but for its other threads.
        ended = fields[_STATE_FIELD] in "ZX" and int(fields[_THREADS_FIELD]) <= 1
        return ended or fields[_START_FIELD] != began
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _here() -> str:
    """This boot of this machine, and the namespace in which process ids mean something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def started(pid: int) -> str:
    """When the process started, in ticks since boot. Raises :class:`OSError` where there is none."""
    return _fields(pid)[_START_FIELD]


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
