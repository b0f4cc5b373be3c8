"""With which status a command ends: one number for one meaning, whatever the command. The table in
``docs/operations.md`` says the same. A number is never given another meaning."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """For scripts and schedulers to go by."""

    WELL = 0
    ERROR = 1
    """Without a number of its own."""
    USAGE = 2
    STORE = 3
    FORMAT = 4
    DAMAGED = 5
    NO_CHECKPOINT = 6
    MISMATCH = 7
    SAVE = 8
    IN_USE = 9
    NO_DAEMON = 10
    RESOURCES = 11
    DEADLINE = 12
    OLDER_IS_GOOD = 13
    """The newest checkpoint is damaged."""
    BAD_NODE = 14
    STOPPED = 15
    """As asked, and saved: start it again. A rank that stops so ends likewise."""
    CRASH_LOOP = 16
    NEVER_STARTED = 17
    RESTARTS_USED_UP = 18
    RENDEZVOUS_LOST = 19
    """Its nodes cannot meet any more: start it again on all of them."""
    INTERRUPTED = 130
    """As shells have it for Ctrl-C."""
