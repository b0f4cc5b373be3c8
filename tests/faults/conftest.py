"""A small disk of the module's own, and a daemon that no capability lets past a folder's mode."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import Daemon
from tests.faults.disk import SmallDisk

WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner,-sys_resource")
"""What root must give up for modes and limits to mean something to it."""


@pytest.fixture(scope="module")
def disk(private_folders: Path) -> Iterator[SmallDisk]:
    """Where this cannot be had, its tests fail."""
    place = private_folders / uuid.uuid4().hex[:8]
    place.mkdir()
    small = SmallDisk(place)
    try:
        small.open()
        yield small
    finally:
        small.close()


@pytest.fixture(scope="module")
def daemon(private_folders: Path) -> Iterator[Daemon]:
    """One for all tests of a module."""
    under = WITHOUT_PRIVILEGES if os.geteuid() == 0 else ()
    found = Daemon(private_folders / uuid.uuid4().hex[:8], under=under)
    found.start()
    yield found
    found.kill()
