"""The daemons that the tests of the client and of the daemon share."""

from __future__ import annotations

from tests.client.conftest import daemon, own_daemon
from tests.daemon.conftest import socket_path

__all__ = ["daemon", "own_daemon", "socket_path"]
