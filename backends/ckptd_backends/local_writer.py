"""One file that is not there yet: written under a temporary name, synced, and then published whole."""

from __future__ import annotations

import contextlib
import errno
import os

from ckptd.errors import AccessDenied, AlreadyExists, StorageError
from ckptd.limits import PAGE_BYTES
from ckptd_backends.files import Files, FileState, address_of, unsupported
from ckptd_backends.local_directories import Directories
from ckptd_backends.local_errors import mapped
from ckptd_backends.local_temporaries import temporary_name

DIRECT_BYTES_MIN = 1024 * 1024
"""Smaller objects go through the page cache, which is as fast and simpler."""
FOLDER_ATTEMPTS_MAX = 64
"""So often a new file is tried again where sweeping processes remove its folder, or itself, in between."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOENT}
"""``ENOENT``: without ``/proc``, or where somebody else has removed the temporary name."""
_NO_RENAME_NOREPLACE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class NewFile:
    """Blocking. The calls: ``create``, any number of ``write`` at once, ``publish``, and always ``discard`` at last.

    ``body_bytes``: so much from the start may be written with ``O_DIRECT``, in parts that begin and end at multiples
    of the page size; the rest is to be written after that, through the page cache.
    """

    def __init__(self, files: Files, directories: Directories, key: str, target: str, view: memoryview) -> None:
        self._files = files
        self._directories = directories
        self._key = key
        self._target = target
        self._folder = os.path.dirname(target)
        self._temporary = ""
        self._view = view
        self._descriptor = -1
        self._given_up = False
        self.direct = False
        self.body_bytes = 0

    def create(self) -> None:
        """Make the temporary file in the folder of the target, with room for all its bytes."""
        size = self._view.nbytes
        with mapped(self._key, self._target, room=self._room):
            self._open()
            if size:
                self._reserve(size)
            if size >= DIRECT_BYTES_MIN and address_of(self._view) % PAGE_BYTES == 0:
                self._set_direct(True)
        if self.direct:
            self.body_bytes = size - size % PAGE_BYTES

    def _open(self) -> None:
        for attempt in range(FOLDER_ATTEMPTS_MAX):
            try:
                self._directories.ensure(self._folder)
                self._temporary = os.path.join(self._folder, temporary_name())
                self._descriptor = self._files.create(self._temporary)
            except FileNotFoundError:
                if attempt == FOLDER_ATTEMPTS_MAX - 1:
                    raise
                continue  # a folder was empty, and another process that sweeps removed it just now
            if self._is_claimed() and self._is_in_place():
                return
            self._files.close(self._descriptor)
            self._descriptor = -1
        raise StorageError(f"new files in {self._folder} are removed as soon as they are made", key=self._key)

    def _is_claimed(self) -> bool:
        """Whether the new file is marked as one with a living writer, and was not swept just before that."""
        try:
            claimed = self._files.lock(self._descriptor)
        except OSError:
            return True  # without locks there, nobody sweeps it while it is new
        return claimed and self._files.state_of(self._descriptor).links > 0

    def _is_in_place(self) -> bool:
        """Whether the new file lies in the run's own root. A disk that was mounted a moment ago hides what was put in
        its place before; from now on our open file keeps it there."""
        self._directories.root.check()
        try:
            return self._files.state(self._temporary).identity == self._files.state_of(self._descriptor).identity
        except FileNotFoundError:
            return False

    def _room(self) -> str:
        """What is needed and what is free. At the nearest folder that is there: the file's own may be what found no
        room."""
        folder = self._folder
        while True:
            try:
                free = self._files.room(folder)
                break
            except FileNotFoundError:
                folder = os.path.dirname(folder)
        files = "" if free.free_files is None else f" and {free.free_files} files"
        return f"needs {self._view.nbytes} bytes, free {free.free_bytes} bytes{files}"

    def _reserve(self, size: int) -> None:
        try:
            self._files.allocate(self._descriptor, size)
        except OSError as error:
            if not unsupported(error):
                raise  # where room cannot be reserved, a full disk shows in a write

    def _set_direct(self, direct: bool) -> None:
        try:
            self._files.set_direct(self._descriptor, direct)
            self.direct = direct
        except OSError as error:
            if not unsupported(error):
                raise

    def write(self, start: int, stop: int) -> None:
        """Write the bytes ``[start, stop)``, all of them."""
        fell_back = False
        with mapped(self._key, self._target, room=self._room):
            while start < stop:
                try:
                    start += self._files.write(self._descriptor, self._view[start:stop], start)
                except OSError as error:
                    if fell_back or not unsupported(error):
                        raise
                    fell_back = True
                    self.body_bytes = 0
                    self._set_direct(False)  # some file systems tell only now that they have no direct I/O

    def end_body(self) -> None:
        """The body is written; what follows goes through the page cache."""
        if self.body_bytes:
            with mapped(self._key, self._target):
                self._files.set_direct(self._descriptor, False)

    def publish(self, *, if_absent: bool) -> FileState:
        """Sync the bytes, give them their name, sync the name.

        A failed sync is never repeated: the kernel may have dropped the pages that it could not write, and a second
        sync would then report success. The caller starts again in a new file.
        """
        with mapped(self._key, self._target):
            self._files.fsync(self._descriptor)
            if self._given_up:
                raise StorageError("was given up before it was stored", key=self._key)
            if if_absent:
                self._publish_if_absent()
            else:
                self._rename()
            self._files.fsync_directory(self._folder)
            return self._files.state_of(self._descriptor)

    def _publish_if_absent(self) -> None:
        try:
            self._link()
        except FileExistsError:
            # Whoever reads this name and finds it complete may rely on it, so it must be as durable as our own.
            self._files.fsync_directory(self._folder)
            raise AlreadyExists("an object is there", key=self._key) from None

    def _link(self) -> None:
        try:
            self._files.link(self._descriptor, self._target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename_noreplace()
            return
        self._files.unlink(self._temporary)
        self._temporary = ""

    def _rename_noreplace(self) -> None:
        self._check_is_ours(self._temporary)
        try:
            self._files.rename_noreplace(self._temporary, self._target)
        except OSError as error:
            if error.errno not in _NO_RENAME_NOREPLACE:
                raise
            raise StorageError(
                f"the file system of {self._folder} has neither hard links nor rename without replacing",
                key=self._key,
                hint="such a place cannot hold commits; use another file system",
            ) from error
        self._temporary = ""
        self._check_is_ours(self._target)

    def _rename(self) -> None:
        self._check_is_ours(self._temporary)
        self._files.rename(self._temporary, self._target)
        self._temporary = ""
        self._check_is_ours(self._target)

    def _check_is_ours(self, path: str) -> None:
        if self._files.state(path).identity != self._files.state_of(self._descriptor).identity:
            raise AccessDenied(
                f"another user put a different file at {path}",
                key=self._key,
                hint="let nobody else write to the run's folders",
            )

    def give_up(self) -> None:
        """Nobody waits for it any more: it is not to be published from now on. May be called while another call goes
        on."""
        self._given_up = True

    def discard(self) -> None:
        """Close the file and remove the temporary name, if it still has one. Never raises."""
        with contextlib.suppress(OSError):  # closing reports nothing that the sync has not
            if self._descriptor >= 0:
                self._files.close(self._descriptor)
        with contextlib.suppress(OSError):  # a temporary is hidden, and swept later
            if self._temporary and self._descriptor >= 0:
                self._files.unlink(self._temporary)
        self._descriptor = -1
        self._temporary = ""
