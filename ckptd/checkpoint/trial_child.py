"""``python -m ckptd.checkpoint.trial_child``: the process in which a checkpoint is loaded for a trial.

Started by :mod:`ckptd.checkpoint.trial`, which sends its order over standard input. Ends with status 0 where the
function returned, :data:`NOT_BEGUN` where it could not be called, anything else where it failed. Its last words are the
reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil

NOT_BEGUN = 64
"""Exit status: says nothing about the checkpoint."""
LOWEST_NICE = 19
OOM_SCORE_ADJUST = 1000
"""Where memory ends, this goes before all else."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be loaded, and by what."""

    function: str
    url: str
    checkpoint: str
    storage_options: dict[str, Any]


def main() -> None:
    """Load one checkpoint."""
    _stand_back()
    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as orders:
        size = int.from_bytes(_exactly(orders, 8), "big")
        order = msgspec.json.decode(_exactly(orders, size), type=Order)
    status = _load(order)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)  # what libraries do when an interpreter ends is not judged, and threads may be left


def _load(order: Order) -> int:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    name, _, attribute = order.function.partition(":")
    try:
        function = getattr(importlib.import_module(name), attribute)
    except BaseException as error:
        _say(error)
        return NOT_BEGUN
    try:
        function(order.url, order.checkpoint, order.storage_options)
    except BaseException as error:  # SystemExit too: it did not return
        _say(error)
        return 1
    return 0


def _exactly(orders: io.RawIOBase, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = orders.read(size - len(data))
        if not more:
            os._exit(NOT_BEGUN)
        data += more
    return data


def _stand_back() -> None:
    """Training comes first."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUST))
    process = cast(Any, psutil.Process())
    with contextlib.suppress(psutil.Error, OSError):
        process.nice(LOWEST_NICE)
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        process.ionice(psutil.IOPRIO_CLASS_IDLE)


def _say(error: BaseException) -> None:
    sys.stdout.flush()
    message = " ".join(str(error).split())
    print(f"{type(error).__name__}: {message}", file=sys.stderr, flush=True)


def _end_with_the_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):  # nothing more comes but its end
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # what the function has started too
    os._exit(NOT_BEGUN)


if __name__ == "__main__":
    main()
