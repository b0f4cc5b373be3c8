"""The steps of the protocol as a process takes them, named and counted where they can be seen from outside: each change
of a file, each request to S3, each message on the socket, each move of a slot. At a chosen one the process stands
still."""

from __future__ import annotations

import functools
import mmap
import os
import re
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
from ckptd_backends.local_writer import NewFile

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
_WORDS = struct.Struct("<QQQQ")  # passed, stop at, length of a name, went on
_NAME_AT = _WORDS.size
_MESSAGE_TYPE = re.compile(rb'"type":"(\w+)"')
_FOLDERS = {
    "agreement": "agreement",
    "generations": "generation",
    "leases": "lease",
    "manifests": "manifest",
    "marks": "mark",
    "tiers": "tier",
    "tombstones": "tombstone",
}
"""In storage → what lies there."""


class Counter:
    """How many points a process has passed, at which it is to stand still, and how often it went on from one; shared
    with the process by a memfd."""

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

    def stop_at(self, point: int | str) -> None:
        """A number, counted from 1, or the next one of a name. 0: nowhere."""
        name = point.encode() if isinstance(point, str) else b""
        self._words[16:24] = bytes(8)  # whoever reads a name that is half written does not know its length
        self._words[_NAME_AT : _NAME_AT + len(name)] = name
        self._words[8:16] = (0 if name else int(point)).to_bytes(8, "little")
        self._words[16:24] = len(name).to_bytes(8, "little")

    def passes(self, name: str) -> bool:
        """One more; whether this is the one to stand still at. In the counted process, one thread at a time."""
        count, stop, length, _ = _WORDS.unpack_from(self._words)
        self._words[0:8] = (count + 1).to_bytes(8, "little")
        if length:
            return self._words[_NAME_AT : _NAME_AT + length] == name.encode()
        return bool(stop) and count + 1 >= stop

    @property
    def resumed(self) -> int:
        """How often it stood still and went on."""
        return int(_WORDS.unpack_from(self._words)[3])

    def resume(self) -> None:
        """It goes on. In the counted process."""
        self._words[24:32] = (self.resumed + 1).to_bytes(8, "little")

    def close(self) -> None:
        self._words.close()
        os.close(self.descriptor)


class Points:
    """Puts the count into this process's own modules, for the rest of its life."""

    def __init__(self, counter: Counter, tell: Callable[..., None]) -> None:
        """``tell``: is called with the event ``at`` and the point's name before the process stands still, and with
        ``passed`` at the first of each name."""
        self._counter = counter
        self._tell = tell
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._written = threading.local()

    def put_in(self) -> None:
        for name in ("create", "write", "publish", "discard"):
            setattr(NewFile, name, self._for_its_key(getattr(NewFile, name)))
        for name in CHANGES:
            of_what = self._object_of_unlink if name == "unlink" else self._object_of_a_change
            setattr(Files, name, self._around(getattr(Files, name), name, of_what))
        for module in (channel, connection):
            module.send = self._around(module.send, "send", _type_of_sent)  # type: ignore[attr-defined]
            module.receive = self._after_receiving(module.receive)  # type: ignore[attr-defined]
        moved = self._around(Arena.set_record, "move to", lambda args: args[2].state.name)
        Arena.set_record = moved  # type: ignore[method-assign]
        call = self._around(
            botocore.client.BaseClient._make_api_call,  # type: ignore[attr-defined]
            "s3",
            lambda args: f"{args[1]} {_kind(args[2].get('Key', ''))}".rstrip(),
        )
        botocore.client.BaseClient._make_api_call = call  # type: ignore[attr-defined]

    def _for_its_key(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of a new file: changes of a temporary file are told by what it will be."""

        @functools.wraps(function)
        def known(new: Any, *args: Any, **kwargs: Any) -> Any:
            self._written.key = new._key  # a thread does one such thing at a time
            try:
                return function(new, *args, **kwargs)
            finally:
                self._written.key = None

        return known

    def _object_of_a_change(self, args: tuple[Any, ...]) -> str:
        path = next((arg for arg in args[1:] if isinstance(arg, str)), "")
        return _kind(getattr(self._written, "key", None) or path)

    def _object_of_unlink(self, args: tuple[Any, ...]) -> str:
        """A temporary name goes, or an object."""
        return ("temporary " if "/~" in args[1] else "") + self._object_of_a_change(args)

    def _around(
        self, function: Callable[..., Any], verb: str, of_what: Callable[[tuple[Any, ...]], str]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            what = f"{verb} {of_what(args)}".rstrip()
            self._pass(f"before {what}")
            result = function(*args, **kwargs)
            self._pass(f"after {what}")
            return result

        return counted

    def _after_receiving(self, function: Callable[..., tuple[bytes, int | None]]) -> Callable[..., Any]:
        """Before it, the process only waits."""

        @functools.wraps(function)
        def counted(*args: Any) -> tuple[bytes, int | None]:
            data, descriptor = function(*args)
            self._pass(f"after receive {_message_type(data)}".rstrip())
            return data, descriptor

        return counted

    def _pass(self, name: str) -> None:
        with self._lock:
            if name not in self._seen:
                self._seen.add(name)
                self._tell("passed", point=name)
            if not self._counter.passes(name):
                return
            self._counter.stop_at(0)
            self._tell("at", point=name)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            self._counter.resume()


def _type_of_sent(args: tuple[Any, ...]) -> str:
    return _message_type(args[1])


def _message_type(data: bytes) -> str:
    found = _MESSAGE_TYPE.search(data)
    return found[1].decode() if found else "end"


def _kind(path: str) -> str:
    """Which kind of object lies there, or in that folder."""
    *folders, last = path.split("/")
    if last == "run.json":
        return "run"
    if "checkpoints" in folders:
        if not last.startswith("rank-"):
            return "checkpoint"
        return "shard" if last.endswith(".safetensors") else "receipt"
    return next((_FOLDERS[name] for name in (*folders, last) if name in _FOLDERS), "")
