"""Open checkpointers when their process forks, or ends without closing them."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Open(Protocol):
    """What is open."""

    def forget(self) -> None:
        """In a forked child."""
        ...

    def abandon(self) -> None:
        """At the interpreter's exit."""
        ...


_open: weakref.WeakSet[Open] = weakref.WeakSet()


def opened(one: Open) -> None:
    """From now on it is told."""
    _open.add(one)


def closed(one: Open) -> None:
    """It need not be told any more."""
    _open.discard(one)


def _forget_all() -> None:
    for one in list(_open):
        one.forget()


def _abandon_all() -> None:
    for one in list(_open):
        one.abandon()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_abandon_all)
