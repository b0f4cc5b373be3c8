"""Small disks of the tests' own, and a daemon that no capability lets past a folder's mode."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.client.conftest import Daemon
from tests.faults.disk import DiskWithQuotas, SmallDisk

Disk = TypeVar("Disk", bound=SmallDisk)
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner,-sys_resource")
"""What root must give up for modes and limits to mean something to it."""


@contextlib.contextmanager
def _opened(kind: type[Disk], private_folders: Path) -> Iterator[Disk]:
    """Where it cannot be had, its tests fail."""
    place = private_folders / uuid.uuid4().hex[:8]
    place.mkdir()
    disk = kind(place)
    try:
        disk.open()
        yield disk
    finally:
        disk.close()


@pytest.fixture(scope="module")
def disk(private_folders: Path) -> Iterator[SmallDisk]:
    """One for all tests of a module."""
    with _opened(SmallDisk, private_folders) as found:
        yield found


@pytest.fixture
def disk_with_quotas(private_folders: Path) -> Iterator[DiskWithQuotas]:
    """Where there is the tool for it."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs mkfs.btrfs")
    with _opened(DiskWithQuotas, private_folders) as found:
        yield found


@pytest.fixture(scope="module")
def daemon(private_folders: Path) -> Iterator[Daemon]:
    """One for all tests of a module."""
    under = WITHOUT_PRIVILEGES if os.geteuid() == 0 else ()
    found = Daemon(private_folders / uuid.uuid4().hex[:8], under=under)
    found.start()
    yield found
    found.kill()
