"""Which ranks are there now: in a store that outlives them, what an earlier start of the same name has left must not be
taken for this one's. A launcher may start ranks anew without a new name, as torchrun does when nodes come or go."""

from __future__ import annotations

import time
import uuid

from ckptd.errors import DeadlineExceeded
from ckptd_client.meeting import Store

LOOK_AGAIN_SECONDS = 0.5
"""How long a rank is waited for before its call is read anew: the one that was there may have been an earlier one's."""


def roll_call(store: Store, rank: int, world: int, deadline_seconds: float) -> str:
    """A name for this start, that all of its ranks have in common and no other start had. In the ``store`` values
    may be written over.

    Each rank calls by a name of its own, and is answered under that name; so every one of them knows that rank 0 has
    heard it, and not an earlier one. Raises :class:`DeadlineExceeded`, naming the ranks that did not come.
    """
    mine = uuid.uuid4().hex
    until = time.monotonic() + deadline_seconds
    if rank:
        store.put(f"call/{rank}", mine.encode())
        try:
            start = store.get(f"answer/{mine}", deadline_seconds * 2).decode()  # rank 0 may take all of its time
        except DeadlineExceeded:
            raise DeadlineExceeded(f"rank 0 did not answer rank {rank}'s call") from None
        store.put(f"here/{start}/{rank}", b"1")
        return start
    missing = list(range(1, world))
    while missing:
        for other in missing:
            if (call := _got(store, f"call/{other}", until)) is not None:
                store.put(f"answer/{call.decode()}", mine.encode())
        again = min(time.monotonic() + LOOK_AGAIN_SECONDS, until)
        missing = [other for other in missing if _got(store, f"here/{mine}/{other}", again) is None]
        if missing and time.monotonic() >= until:
            raise DeadlineExceeded(f"ranks {missing} did not come within {deadline_seconds:g} s")
    return mine


def _got(store: Store, key: str, until: float) -> bytes | None:
    try:
        return store.get(key, until - time.monotonic())
    except DeadlineExceeded:
        return None
