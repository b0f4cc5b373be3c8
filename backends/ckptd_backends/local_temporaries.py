"""Temporary files: their names, and how those that a writer left behind when it was killed are told and removed.

A writer holds a lock on its temporary for as long as it has it open, and the kernel drops the lock whatever ends the
process. A lock may be seen on the machine that took it only (as on some network file systems), so the name says which
machine that was, and elsewhere only age counts, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from functools import cache

from ckptd.errors import NotFound, StorageError, UsageError
from ckptd.format import keys
from ckptd_backends.files import Files, boot_id
from ckptd_backends.local_directories import Directories
from ckptd_backends.local_errors import mapped

ABANDONED_SECONDS = 86_400.0
"""A temporary whose writer cannot be seen is taken for abandoned when nobody has written to it for so long."""
FOLDERS_SWEPT_MAX = 4096
"""Folders that one sweep looks into, the latest checkpoints first."""

_SWEPT = (
    keys.GENERATIONS,
    keys.MANIFESTS,
    keys.LEASES,
    keys.TOMBSTONES,
    keys.AGREEMENT,
    keys.TIERS,
    keys.LOG,
    keys.CHECKPOINTS,
    keys.MARKS,
)
_NAME = re.compile(r"~ckptd-[0-9]{10,}-[0-9a-f]{12}-[0-9a-f]{16}")


def temporary_name() -> str:
    """A name that no key can have, for one file only: ``~ckptd-<Unix seconds>-<machine>-<random>``."""
    return f"~ckptd-{int(time.time()):010d}-{_machine()}-{secrets.token_hex(8)}"


@cache
def _machine() -> str:
    """Whose kernel keeps our locks: this boot of this machine, whatever container we are in."""
    return (boot_id() or secrets.token_hex(6))[:12]  # drawn at random, ours are told by their age only


def sweep(files: Files, directories: Directories, root: str) -> tuple[int, list[Exception]]:
    """Remove what no writer holds, in the run's own folders: how many, and what could not be done. Blocking."""
    removed = 0
    failures: list[Exception] = []
    for folder, names in _folders(files, root):
        for path in (f"{folder}/{name}" for name in names):
            try:
                with mapped(os.path.relpath(path, root), path):
                    removed += _sweep_one(files, path)
            except NotFound:
                continue  # published, or swept by another daemon
            except (StorageError, UsageError) as error:
                failures.append(error)
        if names:
            directories.remove_if_empty(folder)
    return removed, failures


def _folders(files: Files, root: str) -> Iterator[tuple[str, list[str]]]:
    """The run's folders, each with the names of the temporaries in it."""
    waiting = [root + "/" + prefix.rstrip("/") for prefix in reversed(_SWEPT)]
    waiting.append(root)
    for _ in range(FOLDERS_SWEPT_MAX):
        if not waiting:
            return
        folder = waiting.pop()
        try:
            found = sorted(files.names(folder))
        except OSError:
            continue  # nothing was ever stored there, or it is not ours to read
        if folder != root:
            waiting += [
                f"{folder}/{name}" for name, is_folder in found if is_folder and keys.KEY_PATTERN.fullmatch(name)
            ]
        yield folder, [name for name, is_folder in found if not is_folder and _NAME.fullmatch(name)]


def _sweep_one(files: Files, path: str) -> bool:
    """Whether the temporary was one that nobody writes, and is gone. Raises :class:`OSError`."""
    state = files.state(path)
    if not state.is_file:
        return False  # another user's, as we make no such things
    try:
        descriptor = files.open_to_lock(path)
    except PermissionError:
        return False  # another user's, who may well be writing it
    try:
        unheld = _lock(files, descriptor)
        if unheld is False or files.state_of(descriptor).identity != state.identity:
            return False
        seen = unheld and os.path.basename(path).split("-")[2] == _machine()
        if not seen and _now(files, os.path.dirname(path)) - state.modified_seconds < ABANDONED_SECONDS:
            return False
        # Still locked while the name goes, so that a writer that has just made the file finds that out.
        files.unlink(path)
        return True
    finally:
        files.close(descriptor)


def _lock(files: Files, descriptor: int) -> bool | None:
    """``None`` where the file system has no locks."""
    try:
        return files.lock(descriptor)
    except OSError:
        return None


def _now(files: Files, folder: str) -> float:
    """What time it is for the file system."""
    path = f"{folder}/{temporary_name()}"
    descriptor = files.create(path)
    try:
        return files.state_of(descriptor).modified_seconds
    finally:
        with contextlib.suppress(OSError):
            files.unlink(path)
        files.close(descriptor)
