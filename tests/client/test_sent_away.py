"""A trainer whose run was taken over: told at once, and held up by nothing afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.errors import Superseded
from ckptd_client import Checkpointer
from tests.client.conftest import Daemon, Training, committed
from tests.client.processes import TrainingProcess


def test_saves_of_a_trainer_that_was_sent_away_fail_at_once(own_daemon: Callable[..., Daemon], tmp_run: str) -> None:
    daemon = own_daemon()
    training = Training()
    # Whoever waited for a slot that nobody empties would wait longer than this test.
    ckpt = Checkpointer(tmp_run, training.state, socket=daemon.socket, max_wait=600.0)
    training.step()
    ckpt.save(1).wait(timeout=30)
    with TrainingProcess(daemon.socket, tmp_run, steps=2, options={"takeover": True}) as successor:
        successor.until("end")
    for step in range(2, 6):  # more than there are slots
        training.step()
        save = ckpt.save(step)
        with pytest.raises(Superseded, match="taken over"):
            save.wait(timeout=30)
    with pytest.raises(Superseded):
        ckpt.close()
    assert committed(tmp_run) == [1, 2]
