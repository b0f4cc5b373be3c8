"""The steps of the protocol as a process takes them, counted where they can be seen from outside: each change of a
file, each request to S3, each message on the socket, each move of a slot. At a chosen one the process stands still."""

from __future__ import annotations

import functools
import mmap
import os
import signal
import struct
import threading
from collections.abc import Callable
from typing import Any

import botocore.client

from ckptd.arena.memory import Arena
from ckptd.daemon import connection
from ckptd.wire import channel
from ckptd_backends.files import Files

CHANGES = (
    "create",
    "allocate",
    "write",
    "fsync",
    "link",
    "rename_noreplace",
    "rename",
    "unlink",
    "make_directory",
    "remove_directory",
    "fsync_directory",
)
_WORDS = struct.Struct("<QQ")


class Counter:
    """How many points a process has passed, and at which it is to stand still; shared with the process by a memfd."""

    def __init__(self, descriptor: int | None = None) -> None:
        """``descriptor``: of the one that another process made; closed here."""
        if descriptor is None:
            descriptor = os.memfd_create("points", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self.descriptor = descriptor
        self._words = mmap.mmap(descriptor, mmap.PAGESIZE)

    @property
    def passed(self) -> int:
        return int(_WORDS.unpack_from(self._words)[0])

    def stop_at(self, number: int) -> None:
        """0: nowhere."""
        self._words[8:16] = number.to_bytes(8, "little")

    def passes(self) -> bool:
        """One more; whether this is the one to stand still at. In the counted process, one thread at a time."""
        count, stop = _WORDS.unpack_from(self._words)
        self._words[0:8] = (count + 1).to_bytes(8, "little")
        return bool(stop) and count + 1 >= stop

    def close(self) -> None:
        self._words.close()
        os.close(self.descriptor)


class Points:
    """Puts the count into this process's own modules, for the rest of its life."""

    def __init__(self, counter: Counter, tell: Callable[..., None]) -> None:
        """``tell``: is called with the event ``at`` and the point's name before the process stands still."""
        self._counter = counter
        self._tell = tell
        self._lock = threading.Lock()

    def put_in(self) -> None:
        for name in CHANGES:
            setattr(Files, name, self._around(getattr(Files, name), name))
        for module, name in ((channel, "send"), (channel, "receive"), (connection, "send"), (connection, "receive")):
            setattr(module, name, self._around(getattr(module, name), f"{module.__name__.split('.')[-1]}.{name}"))
        Arena.set_record = self._around(Arena.set_record, "set_record")  # type: ignore[method-assign]
        call = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]
        botocore.client.BaseClient._make_api_call = self._around(call, "s3")  # type: ignore[attr-defined]

    def _around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            detail = f" {args[1]}" if name == "s3" else ""
            if not name.endswith("receive"):  # before it, the process only waits
                self._pass(f"before {name}{detail}")
            result = function(*args, **kwargs)
            self._pass(f"after {name}{detail}")
            return result

        return counted

    def _pass(self, name: str) -> None:
        with self._lock:
            if not self._counter.passes():
                return
            self._counter.stop_at(0)
            self._tell("at", point=name)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
