"""Which uploads are open, kept on local disk, so that a writer that was killed leaves no invisible parts behind.

One file for each writer, locked for as long as the writer lives: the kernel drops the lock whatever ends the process,
so whoever can take it knows that the uploads in the file are nobody's. Lines are JSON: ``{"begin": n, "key": …}``
before the upload is created, ``{"created": n, "upload_id": …}``, ``{"ended": n}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd_backends.local_errors import mapped


@dataclass(slots=True)
class OpenUpload:
    """An upload that was begun and not seen to end."""

    number: int
    key: str
    upload_id: str = ""
    """Empty where the writer died before it learned the id."""
    abandoned: bool = False
    """Its abort failed; it may be aborted by anybody."""


class UploadJournal:
    """The journal of one backend under one root. Blocking, thread-safe. Without ``state_dir`` nothing is written."""

    def __init__(self, state_dir: Path | None, root: str) -> None:
        name = hashlib.sha256(root.encode()).hexdigest()[:16]
        self._folder = state_dir / "s3-uploads" / name if state_dir else None
        self._lock = threading.Lock()
        self._descriptor = -1
        self._path = ""
        self._open: dict[int, OpenUpload] = {}
        self._number = 0

    def begin(self, key: str) -> OpenUpload:
        """To be called before the upload is created."""
        with self._lock:
            self._number += 1
            upload = self._open[self._number] = OpenUpload(self._number, key)
            self._write({"begin": upload.number, "key": key})
            return upload

    def created(self, upload: OpenUpload, upload_id: str) -> None:
        """The store gave the upload its id."""
        with self._lock:
            upload.upload_id = upload_id
            self._write({"created": upload.number, "upload_id": upload_id})

    def ended(self, upload: OpenUpload) -> None:
        """It was completed or aborted. Idempotent."""
        with self._lock:
            if self._open.pop(upload.number, None) is None:
                return  # somebody else was quicker to abort it
            self._write({"ended": upload.number})
            if not self._open and self._descriptor >= 0:
                os.ftruncate(self._descriptor, 0)

    def abandoned(self) -> list[OpenUpload]:
        """Own uploads whose abort failed."""
        with self._lock:
            return [upload for upload in self._open.values() if upload.abandoned]

    @contextlib.contextmanager
    def dead_writers(self) -> Generator[list[DeadJournal]]:
        """The journals of writers under this root that no longer live, locked while the context lasts."""
        found: list[DeadJournal] = []
        try:
            for path in sorted(self._folder.glob("*.jsonl")) if self._folder else []:
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue  # its writer has just closed it
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(descriptor)
                    continue
                found.append(DeadJournal(path, descriptor))
            yield found
        finally:
            for journal in found:
                os.close(journal.descriptor)

    def close(self) -> None:
        """Give up the lock; the file goes too, unless an upload in it is still open. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                if not self._open:
                    os.unlink(self._path)
                os.close(self._descriptor)
                self._descriptor = -1

    def _write(self, line: dict[str, Any]) -> None:
        if self._folder is None:
            return
        with mapped("the journal of uploads", str(self._folder)):
            if self._descriptor < 0:
                self._create(self._folder)
            # Not synced: after a power loss the bucket's own rule for incomplete uploads has to do.
            os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def _create(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._path = str(folder / f"{secrets.token_hex(8)}.jsonl")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.path.exists(self._path):
                return
            os.close(self._descriptor)  # taken for dead, and removed, between the two calls


@dataclass(frozen=True, slots=True)
class DeadJournal:
    """What a writer that died has left."""

    path: Path
    descriptor: int

    def uploads(self) -> list[OpenUpload]:
        """The uploads that were open at the end. A last line that was cut off counts for nothing."""
        found: dict[int, OpenUpload] = {}
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            match json.loads(line):
                case {"begin": int(number), "key": str(key)}:
                    found[number] = OpenUpload(number, key)
                case {"created": int(number), "upload_id": str(upload_id)}:
                    found[number].upload_id = upload_id
                case {"ended": int(number)}:
                    found.pop(number, None)
                case _:
                    continue
        return list(found.values())

    def remove(self) -> None:
        """All of them are settled."""
        self.path.unlink(missing_ok=True)
