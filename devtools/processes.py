"""Child processes that never outlive their purpose, free ports, and waits with a deadline."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from ckptd.errors import DeadlineExceeded, ResourceError

GRPC_OFFSET = 10_000
"""SeaweedFS listens for gRPC on every port plus this."""

PORT_FIRST, PORT_LAST = 12_000, 22_000
"""Below the kernel's ephemeral range even with the offset added, so that no outgoing connection takes one away."""


def free_ports(count: int, *, paired: bool = False) -> list[int]:
    """``count`` distinct ports of 127.0.0.1 on which nothing listens; ``paired``: those plus 10,000 are free too.

    They are not reserved: whoever binds one must be ready to lose the race and ask again.
    """
    found: list[int] = []
    for port in random.sample(range(PORT_FIRST, PORT_LAST), 50 * count):
        if _bindable(port) and (not paired or _bindable(port + GRPC_OFFSET)):
            found.append(port)
        if len(found) == count:
            return found
    raise ResourceError(f"fewer than {count} free ports between {PORT_FIRST} and {PORT_LAST}")


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def spawn(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: IO[bytes] | int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process as the leader of its own group, which dies with the thread that started it.

    ``env`` is added to this process's. ``output`` takes stdout and stderr together. The kernel sends SIGKILL when the
    parent dies in whatever way (``setpriv`` arms that without a hook between fork and exec).
    """
    return subprocess.Popen(
        [shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL", *map(str, argv)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen[bytes], *, deadline_seconds: float = 10) -> None:
    """SIGKILL a process that :func:`spawn` started with all of its group, and reap it. Idempotent."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(deadline_seconds)


def wait_until(
    condition: Callable[[], bool], what: str, *, deadline_seconds: float, every_seconds: float = 0.02
) -> None:
    """Poll until ``condition`` holds; raise :class:`DeadlineExceeded` naming ``what`` if it does not in time."""
    deadline = time.monotonic() + deadline_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {deadline_seconds:g} s for {what}")
        time.sleep(every_seconds)
