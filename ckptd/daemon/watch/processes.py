"""What the kernel says of a trainer's processes, where this daemon can see them; and their stacks by py-spy, where
that is installed and permitted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import msgspec
import psutil

from ckptd.limits import CHILDREN_MAX, DUMP_SECONDS, STACKS_BYTES_MAX

COMMAND_CHARS_MAX = 200
COMMAND_WORDS = 3
"""Enough to tell what it is; what follows may be secret."""


class ProcessSeen(msgspec.Struct, kw_only=True):
    """One process at one moment. Empty where the kernel did not tell."""

    pid: int
    state: str = ""
    """As psutil has it: running, sleeping, disk-sleep, stopped, zombie …"""
    waits_in: str = ""
    """The kernel function that it sleeps in."""
    threads: int = 0
    cpu_seconds: float = 0.0
    command: str = ""
    stacks: str = ""


def look_at(pid: int) -> ProcessSeen:
    """Whatever can be seen of it."""
    seen = ProcessSeen(pid=pid)
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            seen.state = process.status()
            seen.threads = process.num_threads()
            times = process.cpu_times()
            seen.cpu_seconds = round(times.user + times.system, 2)
            seen.command = " ".join(process.cmdline()[:COMMAND_WORDS])[:COMMAND_CHARS_MAX]
    with contextlib.suppress(OSError):
        seen.waits_in = Path(f"/proc/{pid}/wchan").read_text().strip().strip("0")
    return seen


def children_of(pid: int) -> list[int]:
    """The processes below it, such as those that load data; at most :data:`CHILDREN_MAX`. Not this daemon, which the
    trainer may have started, nor what is below that."""
    try:
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        below = {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return sorted(below - ours)[:CHILDREN_MAX]
    except psutil.Error:
        return []


def signal_if_caught(pid: int, number: int) -> bool:
    """Send it a signal that it catches; one that does not, as it was not forked from the trainer, would die of it."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _catches(pid, number):
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


async def by_py_spy(pid: int) -> str:
    """The process's stacks as py-spy reads them from outside, also where it is stopped; empty where it cannot."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    process = await asyncio.create_subprocess_exec(
        program,
        *("dump", "--nonblocking", "--pid", str(pid)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DUMP_SECONDS)
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace")[:STACKS_BYTES_MAX] if process.returncode == 0 else ""
