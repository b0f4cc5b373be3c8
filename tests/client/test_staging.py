"""The snapshot: a point in time, whatever the training does while it is copied."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptd.errors import SnapshotVoided, StateError
from ckptd_client import Checkpointer, Save
from ckptd_client.reader import open_checkpoint
from ckptd_client.staging.earning import OVERLAP_BYTES_MIN
from tests.client.conftest import Training

Open = Callable[..., Checkpointer]


class StepCounter(torch.optim.Optimizer):
    """Sets every element of every parameter to the number of steps done, so that any mixture shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        self.done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(self.done)
                self.state[parameter]["moment"] = self.state[parameter].get("moment", torch.zeros_like(parameter))
                self.state[parameter]["moment"].fill_(self.done)


def counting(count: int = 8, numel: int = 50_000) -> tuple[torch.nn.ParameterList, StepCounter]:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(numel)) for _ in range(count)])
    return model, StepCounter(model.parameters())


def all_values(url: str, step: int) -> set[float]:
    """Every distinct element of the model and the moments in a checkpoint."""
    found: set[float] = set()
    with open_checkpoint(url, step) as view:
        for name in view:
            if name.startswith(("model/", "optimizer/")):
                found |= set(view[name].tensor().unique().tolist())
    return found


def run_and_save_each(ckpt: Checkpointer, optimizer: StepCounter, steps: range) -> list[Save]:
    saves: list[Save] = []
    for step in steps:
        optimizer.step()
        save = ckpt.step(step)
        assert save is not None
        saves.append(save)
    return saves


@pytest.mark.parametrize("check", ["sample", "full", "off"])
def test_r124_no_snapshot_mixes_two_steps(open_ckpt: Open, tmp_run: str, check: str) -> None:
    model, optimizer = counting()
    state = {"model": model, "optimizer": optimizer}
    ckpt = open_ckpt(tmp_run, state, every_steps=1, check=check, slots=3)
    saves = run_and_save_each(ckpt, optimizer, range(1, 13))
    ckpt.flush(60)
    assert any(save.stats.overlapped_bytes for save in saves), "nothing was overlapped, so nothing was tested"
    for save in saves[-3:]:
        assert all_values(tmp_run, save.step) == {float(save.step)}


def test_the_first_saves_are_eager_and_overlap_is_earned(open_ckpt: Open, tmp_run: str) -> None:
    model, optimizer = counting()
    ckpt = open_ckpt(tmp_run, {"model": model, "optimizer": optimizer}, every_steps=1)
    optimizer.step()  # before the first save, the moments come to be
    saves = run_and_save_each(ckpt, optimizer, range(1, 5))
    assert saves[0].stats.overlapped_bytes == 0
    assert saves[-1].stats.overlapped_bytes == 2 * 8 * 50_000 * 4


def test_a_tensor_that_is_copied_sooner_than_watched_does_not_overlap(open_ckpt: Open, tmp_run: str) -> None:
    smallest = OVERLAP_BYTES_MIN // 4
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in (smallest - 1, smallest)])
    optimizer = StepCounter(model.parameters())
    ckpt = open_ckpt(tmp_run, {"model": model, "optimizer": optimizer}, every_steps=1)
    optimizer.step()
    save = run_and_save_each(ckpt, optimizer, range(1, 5))[-1]
    assert save.stats.overlapped_bytes == 2 * OVERLAP_BYTES_MIN, "a parameter and its moment"
    ckpt.flush(30)
    assert all_values(tmp_run, 4) == {5.0}


def test_a_tensor_written_outside_the_step_never_earns_overlap(open_ckpt: Open, tmp_run: str) -> None:
    model, optimizer = counting()
    ckpt = open_ckpt(tmp_run, {"model": model, "optimizer": optimizer}, every_steps=1)
    for step in range(1, 7):
        optimizer.step()
        save = ckpt.step(step)
        assert save is not None
        with torch.no_grad():
            model[0].add_(100)  # a weight decay or clipping of one's own, between save and step
    assert save.stats.overlapped_bytes == (2 * 8 - 1) * 50_000 * 4
    ckpt.flush(30)
    assert all_values(tmp_run, 6) == {6.0}


@pytest.mark.parametrize("bumps_version", [True, False])
def test_a_mixture_voids_the_snapshot_and_names_the_tensor(open_ckpt: Open, tmp_run: str, bumps_version: bool) -> None:
    model, optimizer = counting(numel=4_000_000)
    ckpt = open_ckpt(tmp_run, {"model": model, "optimizer": optimizer}, every_steps=1)
    run_and_save_each(ckpt, optimizer, range(1, 4))
    optimizer.step()
    save = ckpt.save(4)
    assert save.stats.overlapped_bytes
    with torch.no_grad():
        # The last to be copied, changed while the copy runs, behind the fence's back.
        (model[7] if bumps_version else model[7].data).fill_(-1)
    with pytest.raises(SnapshotVoided, match=r"model/7|optimizer/") as caught:
        save.wait("committed", timeout=30)
    assert "fence" in caught.value.hint
    optimizer.step()
    ckpt.save(5).wait("committed", timeout=30)  # the next one is whole again
    assert all_values(tmp_run, 5) == {5.0}


def test_fence_makes_room_for_writes_outside_the_optimizer(open_ckpt: Open, tmp_run: str) -> None:
    model, optimizer = counting(numel=1_000_000)
    ckpt = open_ckpt(tmp_run, {"model": model, "optimizer": optimizer}, every_steps=1)
    run_and_save_each(ckpt, optimizer, range(1, 4))
    optimizer.step()
    save = ckpt.save(4)
    assert save.stats.overlapped_bytes
    ckpt.fence()
    with torch.no_grad():
        model[7].fill_(-1)
    save.wait("committed", timeout=30)
    assert all_values(tmp_run, 4) == {4.0}


def test_r122_what_no_optimizer_owns_is_copied_before_save_returns(open_ckpt: Open, tmp_run: str) -> None:
    state: dict[str, Any] = {"buffer": torch.zeros(1_000_000), "plain": {"list": [1, 2]}}
    ckpt = open_ckpt(tmp_run, state)
    for step in range(1, 4):
        state["buffer"].fill_(step)
        state["plain"]["list"].append(step)
        save = ckpt.save(step)
        state["buffer"].fill_(-1)
        save.wait("committed", timeout=30)
    with open_checkpoint(tmp_run) as view:
        assert view["buffer"].tensor().unique().tolist() == [3.0]
        assert view.tree["plain"] == {"list": [1, 2, 1, 2, 3]}


def test_r123_the_optimizers_step_counter_is_that_of_the_save(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1)
    for step in range(1, 6):
        training.step()
        ckpt.step(step)
    ckpt.close()
    for step in (1, 5):
        with open_checkpoint(tmp_run, step) as view:
            assert view["optimizer/state/0.weight/step"].tensor().item() == step


def test_no_stale_views_after_tensors_were_replaced(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1)
    for step in range(1, 9):
        training.step()
        if step == 4:
            # Puts new tensors under the old names.
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        if step == 6:
            training.model[0].weight.data = training.model[0].weight.data.clone()
        ckpt.step(step)
    expected = training.optimizer.state_dict()["state"][0]["exp_avg"]
    weight = training.model[0].weight.detach().clone()
    ckpt.close()
    with open_checkpoint(tmp_run, 8) as view:
        assert torch.equal(view["optimizer/state/0.weight/exp_avg"].tensor(), expected)
        assert torch.equal(view["model/0.weight"].tensor(), weight)


def test_the_structure_may_change_between_saves(open_ckpt: Open, tmp_run: str) -> None:
    state: dict[str, Any] = {"a": torch.ones(10)}
    ckpt = open_ckpt(tmp_run, state)
    ckpt.save(1).wait(timeout=10)
    state["b"] = torch.ones(3_000_000)  # larger than the arena that was made
    ckpt.save(2).wait(timeout=10)
    del state["a"]
    state["b"] = torch.ones(5, dtype=torch.int64)
    ckpt.save(3).wait(timeout=10)
    shapes = []
    for step in (1, 2, 3):
        with open_checkpoint(tmp_run, step) as view:
            shapes.append({name: tuple(view[name].shape) for name in view if not name.startswith("rng")})
    assert shapes == [{"a": (10,)}, {"a": (10,), "b": (3_000_000,)}, {"b": (5,)}]


def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_written(open_ckpt: Open, tmp_run: str) -> None:
    with pytest.raises(StateError, match="model/weight"):
        open_ckpt(tmp_run, {"model": torch.nn.Linear(2, 2, device="meta")})


def test_r34_a_snapshot_changes_nothing(open_ckpt: Open, tmp_run: str) -> None:
    reference, training = Training(), Training()
    ckpt = open_ckpt(tmp_run, training.state)
    random_state = torch.get_rng_state()
    ckpt.save(0)  # before the optimizer has a state
    assert torch.equal(random_state, torch.get_rng_state())
    assert not training.optimizer.state
    torch.manual_seed(7)
    for _ in range(3):
        reference.step()
    torch.manual_seed(7)
    for step in range(1, 4):
        training.step()
        ckpt.save(step)
    assert training.losses == reference.losses


@pytest.mark.parametrize("fused", [False, True])
def test_fused_and_plain_optimizers_are_held_by_the_fence(open_ckpt: Open, tmp_run: str, fused: bool) -> None:
    training = Training(width=512)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), fused=fused)
    training.scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 5)
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1, slots=3)
    expected: dict[int, torch.Tensor] = {}
    overlapped = 0
    for step in range(1, 9):
        training.step()
        expected[step] = training.model[2].weight.detach().clone()
        save = ckpt.step(step)
        assert save is not None
        overlapped += save.stats.overlapped_bytes
    ckpt.close()
    assert overlapped
    for step in (7, 8):
        with open_checkpoint(tmp_run, step) as view:
            assert torch.equal(view["model/2.weight"].tensor(), expected[step])


def test_a_skipped_scaler_step_is_a_boundary(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ckpt = open_ckpt(tmp_run, {**training.state, "scaler": scaler}, every_steps=1)
    saved = []
    for step in range(1, 4):
        loss = training.model(torch.randn(8, training.width)).square().mean()
        training.optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(training.optimizer)  # skips in the second step
        scaler.update()
        saved.append(ckpt.step(step))
    ckpt.close()
    assert [save.step for save in saved if save is not None and save.state == "committed"] == [1, 2, 3]


def test_an_optimizer_that_takes_the_place_of_another_is_held_and_counts(open_ckpt: Open, tmp_run: str) -> None:
    training = Training()
    state = training.state
    ckpt = open_ckpt(tmp_run, state, every_steps=1)
    training.step()
    first = ckpt.step(1)
    training.optimizer = state["optimizer"] = torch.optim.AdamW(training.model.parameters(), lr=0.02)
    training.step()
    second = ckpt.step(2)
    assert first is not None
    assert second is not None
    assert second.state != "deferred"
    ckpt.close()
    assert [save.state for save in (first, second)] == ["committed"] * 2


def test_r141_memory_stays_flat_over_many_saves(open_ckpt: Open, tmp_run: str) -> None:
    import psutil

    training = Training(width=512)
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1)
    process = psutil.Process()
    used: list[int] = []
    for step in range(1, 31):
        training.step()
        save = ckpt.step(step)
        assert save is not None
        save.wait("committed", timeout=30)
        gc.collect()
        used.append(process.memory_info().rss)
    state_bytes = save.stats.bytes
    assert used[-1] - used[5] < state_bytes / 2, f"grew from {used[5]} to {used[-1]} for a state of {state_bytes}"
