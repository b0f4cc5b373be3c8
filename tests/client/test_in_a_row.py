"""Many saves in a row: what trainer and daemon hold stays flat; ``make soak`` looks for longer, at many."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckptd.limits import MIB
from ckptd_client import Checkpointer, Keep
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training
from tests.soak.holdings import Holding, holding_of

WARM_SAVES, SAVES = 50, 200
SPREAD = 8
"""Descriptors and threads that come and go, or are had only when there is much to do at once."""
GROWTH_BYTES_MAX = 24 * MIB
"""Garbage is looked for only now and then."""


def flat(before: Holding, after: Holding) -> bool:
    return (
        after.descriptors <= before.descriptors + SPREAD
        and after.threads <= before.threads + SPREAD
        and after.private_bytes <= before.private_bytes + GROWTH_BYTES_MAX
        and after.shared_bytes <= before.shared_bytes + MIB
    )


def test_two_hundred_saves_in_a_row_leave_nothing_behind(
    own_daemon: Callable[..., Daemon], open_ckpt: Callable[..., Checkpointer], tmp_run: str
) -> None:
    daemon = own_daemon()
    training = Training(width=16, layers=1)
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1, keep=Keep(last=2), socket=daemon.socket)
    pids = (os.getpid(), daemon.pid)

    def save(first: int, last: int) -> list[Holding]:
        for step in range(first, last + 1):
            training.step()
            ckpt.step(step)
        ckpt.flush(timeout=60)
        return [holding_of(pid) for pid in pids]

    before = save(1, WARM_SAVES)
    save(WARM_SAVES + 1, WARM_SAVES + SAVES)
    wait_until(
        lambda: all(flat(held, holding_of(pid)) for held, pid in zip(before, pids, strict=True)),
        f"{before} again",
        deadline_seconds=30,
    )
