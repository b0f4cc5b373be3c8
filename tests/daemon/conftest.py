"""A place for the sockets of one test, and a daemon for those that leave it alone."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.trainer import DaemonProcess, daemon_at


@pytest.fixture
def socket_path(private_folders: Path) -> Path:
    """In a folder that does not exist yet."""
    return private_folders / uuid.uuid4().hex[:8] / "d.sock"


@pytest.fixture(scope="module")
def daemon(private_folders: Path) -> Iterator[DaemonProcess]:
    """One for all tests of a module."""
    with daemon_at(private_folders / uuid.uuid4().hex[:8] / "d.sock", "--commit-takeover", "0.3") as process:
        yield process
