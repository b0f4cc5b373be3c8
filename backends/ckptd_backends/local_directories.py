"""Folders whose names are known to be durable."""

from __future__ import annotations

import contextlib
import os

from ckptd.errors import AccessDenied, ConfigError, UsageError
from ckptd_backends.files import Files
from ckptd_backends.local_root import Root


class Directories:
    """The folders below one root (a path without symbolic links), made as they are needed, unless the root has gone.

    Blocking; safe from several threads.

    A folder that exists need not be durable: another writer may have made it a moment ago. So the name of each folder
    is synced once by this process, and again where the folder is not the same as then.
    """

    def __init__(self, files: Files, root: str) -> None:
        self.root = Root(files, root)
        self._files = files
        self._root = root
        self._synced: dict[str, tuple[int, int]] = {}

    def ensure(self, path: str) -> None:
        """Make ``path`` and what is missing above it; their names are durable on return."""
        below_root = path != self._root
        if below_root:
            self.ensure(os.path.dirname(path))
        else:
            self.root.check()
        identity = self._identity(path)
        if identity is None:
            if below_root:
                with contextlib.suppress(FileExistsError):  # another writer was faster
                    self._files.make_directory(path)
            else:
                self._make_above_root()
                self._make(path)
            identity = self._identity(path)
        elif self._synced.get(path) == identity:
            return
        self._sync_name(path)
        if identity is not None:
            self._synced[path] = identity

    def settle(self, path: str) -> None:
        """Make durable what was named in ``path`` and removed from it, and its own name, where it is there: whoever did
        it may have died before that."""
        if self._identity(path) is None:
            self.root.check()
            if self._identity(path) is None:
                return
        self.ensure(path)
        with contextlib.suppress(FileNotFoundError):  # removed by now, and all that was in it before
            self._files.fsync_directory(path)

    def remove_if_empty(self, path: str) -> None:
        """Remove ``path`` and the folders above it as far as they are empty; the root stays."""
        while path != self._root and len(path) > len(self._root):
            try:
                self._files.remove_directory(path)
            except OSError:
                return  # not empty, or gone, or not ours to remove: an empty folder harms nothing
            self._synced.pop(path, None)
            path = os.path.dirname(path)

    def _make_above_root(self) -> None:
        missing: list[str] = []
        parent = os.path.dirname(self._root)
        while self._identity(parent) is None:
            missing.append(parent)
            parent = os.path.dirname(parent)
        for path in reversed(missing):
            self._make(path)
            self._sync_name(path)

    def _make(self, path: str) -> None:
        """The root, or a folder above it, which nobody sweeps away meanwhile."""
        try:
            self._files.make_directory(path)
        except FileExistsError:
            pass
        except FileNotFoundError:  # said by file systems that take no folders, such as /proc
            above = os.path.dirname(path)
            raise AccessDenied(
                f"the folder {path} cannot be made: {above} takes none", hint="name a folder on a disk for the run"
            ) from None

    def _sync_name(self, path: str) -> None:
        try:
            self._files.fsync_directory(os.path.dirname(path))
        except PermissionError:
            if path != self._root:
                raise
            # The root stands in a folder that we may not read; so whoever made the root was somebody else, earlier.

    def _identity(self, path: str) -> tuple[int, int] | None:
        try:
            state = self._files.state(path)
            if state.is_directory:
                return state.identity
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            pass
        if path == self._root or self._root.startswith(path + "/"):
            raise ConfigError(f"{path} is not a folder, so no run can lie at {self._root}", hint="name a folder")
        raise UsageError(f"{path} is not a folder, so nothing can be stored in it: no key may be another's prefix")
