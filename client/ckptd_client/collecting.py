"""When Python looks for garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def collecting_later() -> Generator[None]:
    """No search for garbage meanwhile, in any thread: for what makes a hundred thousand objects and keeps them, each of
    which would be looked at again and again. What is no part of a cycle is freed as ever."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
