"""A small real disk, and what can go wrong with one: ext4 on a loop device over a file in memory. Needs root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

from devtools.processes import wait_until

DISK_BYTES = 96 << 20
BACKING_BYTES = 64 << 20
"""Less than the disk promises, as with a volume that is thinly provisioned."""
BTRFS_BYTES = 128 << 20
"""The least that it takes, near enough."""
INODES = 512
_FREEZE, _THAW, _SHUTDOWN = 0xC0045877, 0xC0045878, 0x8004587D
_WITHOUT_FLUSHING = struct.pack("I", 2)


class SmallDisk:
    """Mounted at ``root``."""

    def __init__(self, place: Path) -> None:
        self._backing = place / "backing"
        self._image = self._backing / "image"
        self._mounted = self.root = place / "disk"

    def open(self) -> None:
        """Make and mount it. Raises where this may not be done here."""
        for folder in (self._backing, self._mounted):
            folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={BACKING_BYTES}", "ckptd-test", self._backing)
        self._make()
        self._mount()

    def _make(self) -> None:
        with self._image.open("wb") as image:
            image.truncate(DISK_BYTES)
        at_once = "lazy_itable_init=0,lazy_journal_init=0"
        _run("mkfs.ext4", "-q", "-F", "-E", at_once, "-J", "size=4", "-N", str(INODES), self._image)

    def _mount(self) -> None:
        _run("mount", "-o", "loop", self._image, self._mounted)

    def _unmounted(self) -> bool:
        return subprocess.run(["umount", self._mounted], check=False, capture_output=True, timeout=30).returncode == 0

    def close(self) -> None:
        for folder in (self._mounted, self._backing):
            subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True, timeout=30)

    # What can go wrong; each is over when the context ends

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """No byte is free."""
        with _ballast(self.root):
            yield

    @contextlib.contextmanager
    def out_of_names(self) -> Iterator[None]:
        """Bytes are free, and not one inode."""
        folder = self.root / "many"
        folder.mkdir()
        with contextlib.suppress(OSError):
            for number in range(INODES):
                (folder / str(number)).touch()
        try:
            yield
        finally:
            shutil.rmtree(folder)

    @contextlib.contextmanager
    def promising_too_much(self) -> Iterator[None]:
        """The disk says that it has room, and the volume beneath it has none: it shows when bytes are written through,
        or the file system stops itself. Over once it is repaired and mounted anew."""
        with _folder(self.root) as descriptor:
            os.fsync(descriptor)
        try:
            with _ballast(self._backing):
                yield
        finally:
            self._mount_anew()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        _run("mount", "-o", "remount,ro", self.root)
        try:
            yield
        finally:
            _run("mount", "-o", "remount,rw", self.root)

    @contextlib.contextmanager
    def away(self, *, hiding: bool = False) -> Iterator[None]:
        """It is not mounted, and what was its folder is empty. ``hiding``: what is put there meanwhile stays, and is
        hidden once the disk is back."""
        wait_until(self._unmounted, "nobody to be in the middle of a call", deadline_seconds=30)
        try:
            yield
        finally:
            for path in self.root.iterdir():
                if not hiding:
                    shutil.rmtree(path)
            self._mount()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Whoever writes or syncs waits."""
        with _folder(self.root) as descriptor:
            fcntl.ioctl(descriptor, _FREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(descriptor, _THAW, 0)

    @contextlib.contextmanager
    def failing(self, unseen_by: int | None = None) -> Iterator[None]:
        """Every operation fails with EIO. Over once it is mounted anew: without what was not durable, as after a loss
        of power. ``unseen_by``: a process that does not see that it is away for a moment then."""
        with _folder(self.root) as descriptor:
            fcntl.ioctl(descriptor, _SHUTDOWN, _WITHOUT_FLUSHING)
        try:
            yield
        finally:
            self._mount_anew(unseen_by)

    def _mount_anew(self, unseen_by: int | None = None) -> None:
        def unmounted() -> bool:
            if unseen_by is not None:
                os.kill(unseen_by, signal.SIGSTOP)
            done = self._unmounted()
            if unseen_by is not None and not done:
                os.kill(unseen_by, signal.SIGCONT)  # it has files open there
            return done

        wait_until(unmounted, "nobody to be in the middle of a call", deadline_seconds=30)
        subprocess.run(["e2fsck", "-p", "-f", self._image], check=False, capture_output=True, timeout=60)
        self._mount()
        if unseen_by is not None:
            os.kill(unseen_by, signal.SIGCONT)


class DiskWithQuotas(SmallDisk):
    """The same with btrfs: the quotas of ext4 and XFS are left out of many a kernel. They hold for root too."""

    def _make(self) -> None:
        with self._image.open("wb") as image:
            image.truncate(BTRFS_BYTES)
        _run("mkfs.btrfs", "-q", "-m", "single", "-d", "single", self._image)

    def _mount(self) -> None:
        super()._mount()
        self.root = self._mounted / "limited"
        _run("btrfs", "quota", "enable", self._mounted)
        _run("btrfs", "subvolume", "create", self.root)

    @contextlib.contextmanager
    def small_quota(self) -> Iterator[None]:
        """More is used than the quota allows."""
        group = f"0/{_run('btrfs', 'inspect-internal', 'rootid', self.root).strip()}"
        # Asked for from outside: within, there is no room to raise it.
        _run("btrfs", "qgroup", "limit", "64K", group, self._mounted)
        try:
            yield
        finally:
            _run("btrfs", "qgroup", "limit", "none", group, self._mounted)


@contextlib.contextmanager
def _ballast(folder: Path) -> Iterator[None]:
    """Take all bytes that are free."""
    path = folder / "ballast"
    taken = 0
    with path.open("wb") as file:
        for step in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), taken, step)
                    taken += step
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def _folder(path: Path) -> Generator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
    return done.stdout
