"""A process that has imported everything and forks others from it, as to import torch takes each of them seconds.

It has no thread, so what it forks is as good as a process of its own. A request is a datagram with what that process is
told, and with descriptors for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from devtools.processes import kill_group

PR_SET_PDEATHSIG = 1
REQUEST_BYTES_MAX = 1 << 16
DESCRIPTORS_MAX = 2
START_SECONDS = 120.0

Signal = Callable[[int, FrameType | None], Any] | int | None


# Here


class Nursery:
    """The process that forks, by the module whose ``main`` calls :func:`nurse`. A context manager; what it has forked
    dies with it. ``env``: all of its environment."""

    def __init__(self, module: str, env: Mapping[str, str] = os.environ) -> None:
        self._module = module
        self._env = {**env, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}

    def __enter__(self) -> Nursery:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", self._module, str(theirs.fileno())],
            env=self._env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._socket.settimeout(START_SECONDS)
        assert self._socket.recv(100) == b"ready", f"{self._module} did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        kill_group(self._process)

    def fork(self, told: dict[str, Any], *descriptors: int) -> int:
        """A process that is told this and has these descriptors, at most :data:`DESCRIPTORS_MAX` of them; its id."""
        socket.send_fds(self._socket, [json.dumps(told).encode()], list(descriptors))
        return int(self._socket.recv(100))


# There


def nurse(live: Callable[..., int]) -> None:
    """Fork until the other end closes the socket that the command line names. ``live`` is called in what is forked,
    with what it is told and its descriptors, and returns its exit status."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the kernel reaps
    gc.collect()
    gc.freeze()
    requests.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            _live(live, usual, json.loads(data), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _live(live: Callable[..., int], usual: Signal, told: dict[str, Any], descriptors: list[int]) -> None:
    """In what is forked, to its end."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.signal(signal.SIGCHLD, usual)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        status = live(told, *descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
