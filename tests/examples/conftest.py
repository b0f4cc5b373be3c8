"""A daemon of the test's own."""

from tests.client.conftest import own_daemon

__all__ = ["own_daemon"]
