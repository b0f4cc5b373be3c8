"""Ranks that skip more steps than the store can be told of."""

from __future__ import annotations

import asyncio
import contextlib

from ckptd.daemon.commit import Patience
from ckptd.daemon.commits import SKIPS_TOLD_AT_ONCE_MAX, SKIPS_UNTOLD_MAX, Commits
from ckptd.daemon.receipts import skip_reason
from ckptd.daemon.tier import Checkpoint
from ckptd.format import keys
from ckptd.format.keys import Version
from ckptd.format.records import Run, encode
from ckptd.limits import SMALL_RECORD_BYTES_MAX
from ckptd.storage import Backend, open_backend
from ckptd_backends.wrappers.base import Wrapper


class Away(Wrapper):
    """Answers nothing until it is back."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.back = asyncio.Event()
        self.calls = 0

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        self.calls += 1
        await self.back.wait()
        return await self.inner.get(key, limit_bytes=limit_bytes)


def checkpoint(store: Backend, step: int) -> Checkpoint:
    return Checkpoint(store, Version(step, 1), 2, "skips")


async def test_skips_wait_for_their_turn_and_do_not_pile_up(tmp_run: str) -> None:
    async with contextlib.aclosing(open_backend(tmp_run, {})) as store:
        await store.put(keys.RUN, encode(Run(run="skips")))
        commits = Commits(
            Patience(commit_seconds=60, takeover_seconds=60), lambda work, name: asyncio.create_task(work)
        )
        away = Away(store)
        skips = [
            asyncio.create_task(commits.skip(checkpoint(away, step), 1, "full"))
            for step in range(1, SKIPS_UNTOLD_MAX + 101)
        ]
        await asyncio.wait(skips[SKIPS_UNTOLD_MAX:])
        assert [task for task in skips if not task.done()] == skips[:SKIPS_UNTOLD_MAX]
        assert away.calls <= SKIPS_TOLD_AT_ONCE_MAX
        assert commits.telling == [away], "it is in use, and the daemon not idle"
        await commits.skip(checkpoint(store, 5000), 1, "full")  # another store is told at once
        away.back.set()
        await asyncio.gather(*skips)
        assert commits.telling == []
        for step in (1, SKIPS_UNTOLD_MAX, 5000):
            data = await store.get(keys.receipt_key(Version(step, 1), 1, 2), limit_bytes=SMALL_RECORD_BYTES_MAX)
            assert skip_reason(data) == "full", "once the store answers again, the others are told"
