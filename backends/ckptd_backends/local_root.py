"""The root of a run on a disk that may go and come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptd.errors import StorageError
from ckptd.format.keys import RUN
from ckptd_backends.files import Files

T = TypeVar("T")


class Root:
    """Blocking; safe from several threads.

    Where a disk was mounted, there is an empty folder, or none. What is put there is hidden as soon as the disk is
    back, and what is not found there may well exist. So once a run was seen at the root, nothing is said or done there
    while the run's own record is missing.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._record = f"{path}/{RUN}"
        self._path = path
        self._seen = False

    def saw(self, key: str) -> None:
        """An object was found, or put."""
        if key == RUN:
            self._seen = True

    def check(self) -> None:
        """Raise :class:`StorageError` where a run was seen, and its record is not there."""
        if not self._seen:
            return
        try:
            self._files.state(self._record)
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"{self._path} has lost its {RUN}: the root was deleted, moved or unmounted",
                hint="mount it or bring it back with its run.json",
            ) from None

    def found(self, path: str, look: Callable[[], T]) -> T:
        """What ``look`` returns, which asks for ``path``. Its :class:`FileNotFoundError` is only passed on where the
        root is there. Raises :class:`StorageError`."""
        try:
            return look()
        except FileNotFoundError:
            if path == self._record:
                raise
            self.check()
            return look()  # the disk may have come back in between
