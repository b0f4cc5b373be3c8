"""The checkpointer against a real daemon: saving, restoring, and what the handle tells."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.errors import ConfigError, MismatchError, NoCheckpoint, UsageError
from ckptd_client import Checkpointer, Keep
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training, committed

Open = Callable[..., Checkpointer]


def test_a_resumed_training_is_bit_for_bit_the_uninterrupted_one(open_ckpt: Open, tmp_run: str) -> None:
    reference = Training()
    for _ in range(12):
        reference.step()

    for stop in (3, 4, 9, 12):
        training = Training(seed=99)  # other weights and random numbers, which the restore has to replace
        if stop == 3:
            training = Training()
        ckpt = open_ckpt(tmp_run, training.state, every_steps=1)
        start = ckpt.restore()
        for step in range(start.step + 1, stop + 1):
            assert training.step() == reference.losses[step - 1]
            ckpt.step(step)
        ckpt.close()
    assert all(map(torch.equal, training.parameters(), reference.parameters()))


def test_what_a_handle_tells(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state)
    training.step()
    save = ckpt.save(1)
    save.wait("sealed", timeout=10)
    save.wait("durable", timeout=10)
    save.wait("committed", timeout=10)
    assert (save.state, save.error, save.done) == ("committed", None, True)
    assert save.stats.bytes > 3 * 3 * 64 * 64 * 4  # parameters and two moments
    assert save.stats.stall_seconds > 0
    assert save.stats.copy_seconds > 0
    assert save.stats.write_seconds > 0
    assert save.stats.path in ("direct", "buffered")
    assert ckpt.save(1) is save  # the same step again is the same save


def test_restore_says_where_from_and_in_which_generation(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=2)
    first = ckpt.restore()
    assert (first.step, first.source, first.generation) == (0, "none", 1)
    for step in range(1, 5):
        training.step()
        ckpt.step(step, loss=training.losses[-1])
    ckpt.close()

    other = Training(seed=1)
    again = open_ckpt(tmp_run, other.state).restore()
    assert (again.step, again.source, again.generation) == (4, "memory", 2)
    assert "model/0.weight" in again.report.loaded
    assert not again.report.missing
    assert not again.report.unexpected
    assert all(map(torch.equal, training.parameters(), other.parameters()))


def test_a_step_is_chosen_and_the_line_goes_on_from_it(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1, keep=Keep(last=10))
    ckpt.restore()
    at: dict[int, list[torch.Tensor]] = {}
    for step in range(1, 5):
        training.step()
        at[step] = training.parameters()
        ckpt.step(step)
    ckpt.close()

    back = open_ckpt(tmp_run, training.state, every_steps=1)
    assert back.restore(step=2).step == 2
    assert all(map(torch.equal, training.parameters(), at[2]))
    training.step()
    back.step(3)
    back.close()
    assert open_ckpt(tmp_run, training.state).restore().step == 3  # and not the 4 that was left behind


def test_required_raises_where_there_is_nothing(open_ckpt: Open, tmp_run: str) -> None:
    with pytest.raises(NoCheckpoint, match="no checkpoint"):
        open_ckpt(tmp_run, Training().state).restore(required=True)


def test_a_mismatch_leaves_the_live_state_as_it_was(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    training.step()
    with open_ckpt(tmp_run, training.state) as ckpt:
        ckpt.save(1)
    wider = Training(layers=4)
    wider.step()
    before = wider.parameters()
    ckpt = open_ckpt(tmp_run, wider.state)
    with pytest.raises(MismatchError, match=r"3\.weight"):
        ckpt.restore()
    assert all(map(torch.equal, before, wider.parameters()))
    report = ckpt.restore(strict=False).report
    assert "model/3.weight" in report.missing
    assert "model/0.weight" in report.loaded


def test_a_run_with_checkpoints_is_not_written_over_unasked(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    training.step()
    with open_ckpt(tmp_run, training.state) as ckpt:
        ckpt.save(1)
    fresh = open_ckpt(tmp_run, training.state)
    with pytest.raises(UsageError, match="already holds checkpoints"):
        fresh.save(1)
    assert fresh.restore(step=0).step == 0
    fresh.save(1).wait(timeout=10)


def test_nothing_draws_from_the_trainings_random_numbers(
    own_daemon: Callable[..., Daemon], open_ckpt: Open, tmp_run: str
) -> None:
    """Neither waiting for a daemon that is not there yet, nor coming back to one that was killed."""
    here = own_daemon()
    state = {"x": torch.zeros(3)}
    before = random.getstate(), np.random.get_state(legacy=True)[1].tolist(), torch.get_rng_state().tolist()
    here.kill()
    ckpt = open_ckpt(tmp_run, state, socket=here.socket)
    ckpt.restore()
    ckpt.save(1).wait(timeout=60)
    here.kill()
    ckpt.save(2).wait(timeout=60)
    ckpt.close()
    here.kill()
    after = random.getstate(), np.random.get_state(legacy=True)[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


def test_random_numbers_of_all_kinds_go_on(open_ckpt: Open, tmp_run: str) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item()]

    state: dict[str, Any] = {"x": torch.zeros(1)}
    with open_ckpt(tmp_run, state) as ckpt:
        draw()
        ckpt.save(1)
        expected = draw()
    draw()
    open_ckpt(tmp_run, state).restore()
    assert draw() == expected


def test_metrics_and_structure_lie_in_the_manifest(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state, every_steps=1) as ckpt:
        training.step()
        ckpt.step(1, loss=0.5, grad_norm=float("inf"))
    manifest = json.loads(next(Path(tmp_run.removeprefix("file://")).glob("manifests/*.json")).read_text())
    assert manifest["metrics"] == {"loss": 0.5, "grad_norm": None}
    assert manifest["parts"] == ["model", "optimizer", "rng", "scheduler"]


def test_keep_leaves_the_newest(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state, every_steps=1, keep=Keep(last=2)) as ckpt:
        for step in range(1, 7):
            training.step()
            save = ckpt.step(step)
            assert save is not None
            save.wait(timeout=10)
    # Deletion comes after the commit, in the background.
    wait_until(lambda: committed(tmp_run) == [5, 6], "the older ones to be deleted", deadline_seconds=20)


def test_a_pinned_save_outlives_retention(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    with open_ckpt(tmp_run, training.state, keep=Keep(last=1)) as ckpt:
        for step in range(1, 5):
            training.step()
            ckpt.save(step, pin=step == 2).wait(timeout=10)
    wait_until(lambda: committed(tmp_run) == [2, 4], "all but the pinned to be deleted", deadline_seconds=20)


def test_a_misspelled_restore_is_refused_before_anything_is_touched(open_ckpt: Open, tmp_run: str) -> None:
    """Training must not go on from random weights because of a letter."""
    training = Training()
    training.step()
    with open_ckpt(tmp_run, training.state) as ckpt:
        ckpt.save(1).wait(timeout=30)
    fresh = Training()
    before = [each.clone() for each in fresh.parameters()]
    with open_ckpt(tmp_run, fresh.state) as ckpt:
        for wrong in ({"include": ["modle/*"]}, {"exclude": ["modle"]}, {"cast": ["modle"]}, {"include": "model"}):
            with pytest.raises(ConfigError, match="mod"):
                ckpt.restore(**wrong)  # type: ignore[arg-type]
        assert all(map(torch.equal, fresh.parameters(), before))
        assert ckpt.restore(include=["model/*"]).step == 1


def test_settings_are_checked_all_at_once(daemon: Daemon, tmp_run: str) -> None:
    with pytest.raises(ConfigError, match=r"every_steps=0.*slots=0.*max_wait=-1"):
        Checkpointer(tmp_run, {}, every_steps=0, slots=0, max_wait=-1, socket=daemon.socket)


def test_a_closed_checkpointer_refuses(open_ckpt: Open, tmp_run: str) -> None:
    ckpt = open_ckpt(tmp_run, {"x": torch.zeros(1)})
    ckpt.close()
    ckpt.close()
    with pytest.raises(UsageError, match="closed"):
        ckpt.step(1)


def test_saves_fall_at_boundaries_of_accumulation(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=2)
    handles = []
    for step in range(1, 5):
        for micro in range(4):
            loss = training.model(torch.randn(4, training.width)).square().mean()
            loss.backward()
            if micro == 3:
                training.optimizer.step()
                training.optimizer.zero_grad()
            handles.append(ckpt.step(step))
    ckpt.close()
    taken = {save for save in handles if save is not None}
    assert sorted(save.step for save in taken) == [2, 4]
    saved = Training(seed=5)
    assert open_ckpt(tmp_run, saved.state).restore().step == 4
    assert all(map(torch.equal, saved.parameters(), training.parameters()))


def test_saves_that_wait_for_the_same_boundary_are_one(open_ckpt: Open, tmp_run: str) -> None:
    """A training that leaves out optimizer steps goes on asking for saves."""
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state)
    training.step()
    ckpt.step(1)
    first, second = ckpt.save(2), ckpt.save(3, pin=True)
    assert (first.state, second.state) == ("deferred", "deferred")
    training.step()
    ckpt.step(4)
    ckpt.close(timeout=30)
    assert (first.step, first.state, second.step, second.state) == (4, "committed", 4, "committed")
    assert first.pin, "as one of both was to be kept"
