"""Ranks that skip more steps than the store can be told of."""

from __future__ import annotations

import asyncio
import contextlib

from ckptd.daemon.commit import Patience
from ckptd.daemon.commits import SKIPS_TOLD_AT_ONCE_MAX, Commits
from ckptd.daemon.receipts import skip_reason
from ckptd.daemon.tier import Checkpoint
from ckptd.format import keys
from ckptd.format.keys import Version
from ckptd.format.records import Run, encode
from ckptd.limits import SMALL_RECORD_BYTES_MAX
from ckptd.storage import Backend, open_backend
from ckptd_backends.wrappers.faults import Slow


def checkpoint(store: Backend, step: int) -> Checkpoint:
    return Checkpoint(store, Version(step, 1), 2, "skips")


async def test_skips_that_a_store_does_not_take_do_not_pile_up(tmp_run: str) -> None:
    async with contextlib.aclosing(open_backend(tmp_run, {})) as store:
        await store.put(keys.RUN, encode(Run(run="skips")))
        commits = Commits(
            Patience(commit_seconds=60, takeover_seconds=60), lambda work, name: asyncio.create_task(work)
        )
        silent = Slow(store, delay_seconds=3600)
        told = [asyncio.create_task(commits.skip(checkpoint(silent, step), 1, "full")) for step in range(1, 1001)]
        await asyncio.wait(told[SKIPS_TOLD_AT_ONCE_MAX:])
        waiting = [task for task in told if not task.done()]
        assert waiting == told[:SKIPS_TOLD_AT_ONCE_MAX]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await commits.skip(checkpoint(store, 2000), 1, "full")
        data = await store.get(keys.receipt_key(Version(2000, 1), 1, 2), limit_bytes=SMALL_RECORD_BYTES_MAX)
        assert skip_reason(data) == "full", "once the store answers again, the others are told"
