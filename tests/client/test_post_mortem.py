"""Checkpoints that are there to be looked at, and not to go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptd_client import Checkpointer
from tests.client.conftest import Training, committed

Open = Callable[..., Checkpointer]


def restored(open_ckpt: Open, url: str, step: Any = "latest") -> tuple[int, list[torch.Tensor]]:
    again = Training(seed=9)
    ckpt = open_ckpt(url, again.state)
    start = ckpt.restore(step)
    ckpt.close()
    return start.step, again.parameters()


@pytest.mark.parametrize("tiers", [1, 2])
def test_r163_what_was_saved_for_a_post_mortem_is_not_resumed(open_ckpt: Open, tmp_run: str, tiers: int) -> None:
    url: Any = tmp_run if tiers == 1 else [tmp_run, f"{tmp_run}-far"]
    training = Training()
    ckpt = open_ckpt(url, training.state)
    ckpt.restore()
    training.step()
    ckpt.save(1).wait(timeout=60)
    good = training.parameters()
    training.step()
    ckpt.save(2, debug=True).wait(timeout=60)  # is in memory too, and newest there
    odd = training.parameters()
    ckpt.close()
    step, parameters = restored(open_ckpt, url)
    assert step == 1
    assert all(map(torch.equal, parameters, good))
    step, parameters = restored(open_ckpt, url, 2)  # asked for by name, it is there
    assert step == 2
    assert all(map(torch.equal, parameters, odd))
    if tiers == 2:
        assert 1 in committed(f"{tmp_run}-far")
        step, _ = restored(open_ckpt, f"{tmp_run}-far")  # the near one is lost
        assert step == 1


def test_where_there_is_nothing_else_it_is_restored_all_the_same(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state)
    ckpt.restore()
    training.step()
    ckpt.save(1, debug=True).wait(timeout=60)
    ckpt.close()
    assert restored(open_ckpt, tmp_run)[0] == 1
