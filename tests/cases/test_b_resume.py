"""Family (b): what goes on after a restore is what would have gone on without it, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from ckptd.errors import MismatchError, StateError, Unavailable
from ckptd.format.common_tree import Merge
from ckptd.jitter import backoff_seconds
from ckptd_backends.retry import RetryPolicy, retried
from tests.client.roundtrip import Stored, assert_same, bits, restore, save, seed_all


class Training:
    """A small training of everything that keeps state; ``loss`` draws from the global generators."""

    def __init__(self, seed: int, *, lr: float = 0.05, weight_decay: float = 0.1) -> None:
        seed_all(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=weight_decay)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(6, 4)).square().sum() * random.random() * float(np.random.rand())
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step()
        return self


def assert_go_on_alike(one: Training, other: Training, steps: int = 3) -> None:
    """Both train on, one after the other from the same random numbers, to the same state in every bit."""
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    expected = save(one.run(steps).state, rng=True)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
    assert_same(save(other.run(steps).state, rng=True), expected)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_training_goes_on_bit_for_bit(steps: int) -> None:
    stored = save((one := Training(1).run(steps)).state, rng=True)
    expected = save(one.run(3).state, rng=True)
    other = Training(2).run(2)
    restore(stored, other.state, rng=True)
    assert_same(save(other.state, rng=True), stored)
    assert_same(save(other.run(3).state, rng=True), expected)


# Random numbers


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_r31_random_numbers_that_cannot_be_restored_are_an_error(generator: str) -> None:
    training = Training(1).run(1)
    stored = save(training.state, rng=True)
    text = stored.tree.decode()
    at = text.index(f'["{generator}",', text.index('["rng",'))
    start = text.index('"bytes","v":"', at) + len('"bytes","v":"')
    forged = text[:start] + "AAAA" + text[text.index('"', start) :]
    broken = dataclasses.replace(stored, tree=forged.encode())
    other = Training(2)
    before = save(other.state, rng=True)
    with pytest.raises(StateError, match=r"rng: .*cannot be used.*rng=False"):
        restore(broken, other.state, rng=True)
    assert_same(save(other.state, rng=True), before)
    report = restore(broken, other.state, rng=False).report
    assert ("rng", "rng=False") in report.skipped


def test_r31_a_checkpoint_without_random_numbers_is_an_error() -> None:
    with pytest.raises(MismatchError, match="missing from the checkpoint: rng"):
        restore(save({"n": 1}), {"n": 0}, rng=True)


def own_generators(rank: int) -> Stored:
    """A rank that draws from streams of its own."""
    seed_all(1000 + rank)
    return save({"n": 1}, rng=True, rank=rank, world=4)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_r32_another_number_of_ranks_draws_from_new_streams_and_says_so() -> None:
    """The same at every restore of a checkpoint; other ones on every rank, on every other number of ranks, and from
    every other checkpoint, and none that any rank had."""
    ranks, merge = [own_generators(rank) for rank in range(4)], Merge()
    known: set[float] = set()
    for rank in range(4):
        restore(ranks[rank], {"n": 0}, rng=True, rank=rank, world=4)
        known.update(drawn())
    for one in ranks:
        merge.add(msgspec.Raw(one.tree), one.layout.aliases)
    common = dataclasses.replace(ranks[0], tree=bytes(merge.tree))
    places = [(identity, world, rank) for identity in ("one", "another") for world in (2, 6) for rank in range(world)]
    for identity, world, rank in places:
        mine: list[tuple[float, ...]] = []
        for seed in (1, 2):
            seed_all(seed)
            here = {"rank": rank, "world": world, "saved_world": 4}
            report = restore(common, {"n": 0}, rng=True, identity=identity, **here).report
            assert any(f"saved by 4 ranks and restored by {world}" in notice for notice in report.notices)
            mine.append(drawn())
        assert mine[0] == mine[1]
        assert not known & set(mine[0])
        known.update(mine[0])
    assert len(known) == 3 * (4 + len(places))


def test_r32_what_all_ranks_drew_alike_goes_on() -> None:
    seed_all(5)
    stored = save({"n": 1}, rng=True, world=4)
    expected = drawn()
    seed_all(6)
    report = restore(stored, {"n": 0}, rng=True, world=2, saved_world=4).report
    assert not report.notices
    assert drawn() == expected


async def test_waiting_for_storage_draws_nothing_from_the_trainings_generator() -> None:
    before = random.getstate()

    async def fail(number: int) -> int:
        if number < 4:
            raise Unavailable("busy")
        return number

    policy = RetryPolicy(delay_seconds=0.001)
    assert await retried(policy, "x", fail) == 4
    assert backoff_seconds(1, 1.0, 1.0) <= 1.0
    assert random.getstate() == before


def test_r33_generator_states_return_in_the_containers_their_setters_want() -> None:
    own = np.random.default_rng(3)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": own.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    expected = (random.random(), np.random.rand(), own.random(), torch.rand(()))
    fresh: dict[str, Any] = {"s": dict.fromkeys(state)}
    restore(save({"s": state}), fresh)
    seed_all(98)
    python, numpy = random.getstate(), np.random.get_state()
    live: dict[str, Any] = {"s": {**dict.fromkeys(state), "python": python, "numpy": numpy}}
    restore(save({"s": state}), live)  # into what is there, and has the same containers
    assert_same(save(live), save(fresh))
    seed_all(99)
    random.setstate(fresh["s"]["python"])
    np.random.set_state(fresh["s"]["numpy"])
    other = np.random.default_rng(4)
    other.bit_generator.state = fresh["s"]["generator"]
    torch.set_rng_state(fresh["s"]["torch"])
    assert (random.random(), np.random.rand(), other.random(), torch.rand(())) == expected


# Capturing changes nothing, at any point of the loop


def test_r34_a_capture_changes_nothing() -> None:
    one, other = Training(1), Training(1)
    generators = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())  # type: ignore[union-attr,index]
    save(one.state, rng=True)
    assert generators[0] == random.getstate()
    assert generators[1] == np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]
    assert torch.equal(generators[2], torch.get_rng_state())
    assert len(one.optimizer.state) == 0
    assert all(parameter.grad is None for parameter in one.model.parameters())
    versions = [tensor._version for tensor in one.model.state_dict().values()]
    save(one.state, rng=True)
    assert versions == [tensor._version for tensor in one.model.state_dict().values()]
    assert_go_on_alike(one, other)


def test_r35_optimizer_state_is_complete_at_every_point_of_the_loop() -> None:
    training = Training(1).run(2)
    training.backward()
    between_backward_and_step = save(training.state)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    between_step_and_zero_grad = save(training.state)
    for stored in (between_backward_and_step, between_step_and_zero_grad):
        moments = [entry for entry in stored.layout.tensors if entry.name.endswith("/exp_avg")]
        assert len(moments) == 6
    other = Training(2)
    restore(between_step_and_zero_grad, other.state)
    for a, b in zip(training.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(training.optimizer.state[a]["exp_avg"], other.optimizer.state[b]["exp_avg"])


@pytest.mark.parametrize("reverse", [False, True])
def test_r36_restoring_the_optimizer_leaves_the_scaler_alone(reverse: bool) -> None:
    """No step is run to make the optimizer's state appear: its hooks, such as one that moves the scale, hear of none,
    and the gradients stay."""
    training, other = Training(1).run(4), Training(2)
    other.backward()
    gradients = [parameter.grad for parameter in other.model.parameters()]
    before = copy.deepcopy(gradients)
    other.optimizer.register_step_post_hook(lambda *_: other.scaler.update(1.0))
    order = list(training.state)[:: -1 if reverse else 1]
    state = {name: training.state[name] for name in order}
    fresh = {name: other.state[name] for name in order}
    stored = save(state, rng=True)
    restore(stored, fresh, rng=True)
    assert_same(save(fresh, rng=True), stored)
    assert other.scaler.state_dict() == training.scaler.state_dict()
    for parameter, live, value in zip(other.model.parameters(), gradients, before, strict=True):
        assert parameter.grad is live
        assert live is not None
        assert value is not None
        assert torch.equal(live, value)


def test_r37_the_loss_scale_is_part_of_the_state_and_its_absence_reported() -> None:
    training = Training(1).run(2)
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 7})
    other = Training(2)
    restore(save(training.state), other.state)
    assert other.scaler.get_scale() == 512.0
    assert other.scaler.state_dict()["_growth_tracker"] == 7
    without = {name: part for name, part in training.state.items() if name != "scaler"}
    with pytest.raises(MismatchError, match="missing from the checkpoint: scaler"):
        restore(save(without), other.state)
    report = restore(save(without), other.state, strict=False).report
    assert report.missing == ("scaler",)


def test_r37_a_scaler_that_is_switched_off_on_one_side_is_an_error() -> None:
    on, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    for saved, live in ((on, off), (off, on)):
        with pytest.raises(MismatchError, match="enabled"):
            restore(save({"scaler": saved}), {"scaler": live})
    restore(save({"scaler": off}), {"scaler": off})


# Optimizers


@pytest.mark.parametrize("order", [["optimizer", "scheduler"], ["scheduler", "optimizer"]])
def test_r41_no_constructor_value_survives_whatever_the_order(order: list[str]) -> None:
    training = Training(1).run(3)
    other = Training(2, lr=7.0, weight_decay=0.9)
    stored = save({name: training.state[name] for name in order})
    restore(stored, {name: other.state[name] for name in order})
    for field in ("lr", "weight_decay", "betas", "max_lr", "initial_lr", "min_lr"):
        assert other.optimizer.param_groups[0][field] == training.optimizer.param_groups[0][field]
    assert other.scheduler.get_last_lr() == training.scheduler.get_last_lr()


def test_r42_fields_of_groups_are_kept_whole() -> None:
    def make() -> torch.optim.Optimizer:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    saved, live = make(), make()
    saved.param_groups[0] |= {"initial_lr": 0.7, "mine": {"a": (1, 2)}, "scale": torch.tensor(2.0)}
    restore(save({"optimizer": saved}), {"optimizer": live})
    for a, b in zip(saved.param_groups, live.param_groups, strict=True):
        assert list(a) == list(b)
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


class Two(nn.Module):
    """Two layers of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x))
        return result


def _two(order: Callable[[Two], Any]) -> dict[str, Any]:
    model = Two()
    return {"model": model, "optimizer": torch.optim.Adam(order(model))}


def _step(state: dict[str, Any]) -> None:
    state["model"](torch.randn(2, 3)).square().sum().backward()
    state["optimizer"].step()


@pytest.mark.parametrize(
    "order",
    [
        lambda model: [*model.b.parameters(), *model.a.parameters()],
        lambda model: list(model.parameters())[::-1],
        lambda model: sorted(model.parameters(), key=id),
    ],
)
def test_r43_momentum_finds_its_weight_whatever_the_order(order: Callable[[Two], Any]) -> None:
    saved, live = _two(lambda model: list(model.parameters())), _two(order)
    _step(saved)
    restore(save(saved), live)
    for name, parameter in saved["model"].named_parameters():
        twin = live["model"].get_parameter(name)
        assert torch.equal(twin, parameter)
        assert torch.equal(live["optimizer"].state[twin]["exp_avg"], saved["optimizer"].state[parameter]["exp_avg"]), (
            name
        )


def test_r43_another_set_of_parameters_is_an_error() -> None:
    saved = _two(lambda model: list(model.parameters()))
    _step(saved)
    fewer = _two(lambda model: [model.a.weight, model.a.bias])
    with pytest.raises(MismatchError, match=r"optimizer/state/b\.weight"):
        restore(save(saved), fewer)
    cut_otherwise = _two(lambda model: [{"params": model.a.parameters()}, {"params": model.b.parameters()}])
    with pytest.raises(MismatchError, match=r"optimizer/param_groups/~l0 \(group 0 of the checkpoint has other"):
        restore(save(saved), cut_otherwise)
    with pytest.raises(MismatchError, match=r"its parameters are in groups \[0, 1\]"):
        restore(save(cut_otherwise), saved)


def test_r43_parameters_of_no_module_are_known_by_place_and_shape() -> None:
    def make(shapes: list[int]) -> dict[str, Any]:
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float(parameter.numel()))
        optimizer.step()
        return {"optimizer": optimizer}

    live = make([2, 3])
    before = save(live)
    restore(before, live)
    with pytest.raises(MismatchError, match="optimizer/state"):
        restore(save(make([3, 2])), live)
    assert_same(save(live), before)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_r44_state_keeps_the_dtype_in_which_it_was_saved(parameters: torch.dtype) -> None:
    moments = torch.float32 if parameters is torch.bfloat16 else torch.bfloat16

    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2).to(parameters)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    saved, live = make(), make()
    for parameter in saved["model"].parameters():
        saved["optimizer"].state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape).to(moments),
            "exp_avg_sq": torch.rand(parameter.shape).to(moments),
        }
    restore(save(saved), live)
    for a, b in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
        for field, value in saved["optimizer"].state[a].items():
            mine = live["optimizer"].state[b][field]
            assert mine.dtype == value.dtype
            assert torch.equal(bits(mine), bits(value))


class Masters:
    """Full-precision copies beside a model in bfloat16, as mixed-precision optimizers keep them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = [parameter.detach().float() for parameter in model.parameters()]

    def step(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.copies, strict=True):
            master += 1e-3
            parameter.data.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {"copies": self.copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.copies, state["copies"], strict=True):
            mine.copy_(saved)


def test_r45_master_weights_are_kept_where_registered_and_missed_where_not() -> None:
    def make() -> tuple[nn.Module, Masters]:
        model = nn.Linear(8, 8).to(torch.bfloat16)
        return model, Masters(model)

    def resume(state: Callable[[nn.Module, Masters], dict[str, Any]]) -> bool:
        """Whether the resumed run ends where the uninterrupted one does."""
        seed_all(1)
        model, masters = make()
        masters.step()
        stored = save(state(model, masters))
        masters.step()
        other, others = make()
        restore(stored, state(other, others))
        if "masters" not in state(other, others):
            others = Masters(other)
        others.step()
        return all(map(torch.equal, masters.copies, others.copies))

    assert resume(lambda model, masters: {"model": model, "masters": masters})
    assert not resume(lambda model, masters: {"model": model})


class Average:
    """An exponential moving average whose decay warms up with a plain counter."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.updates = 0

    @property
    def decay(self) -> float:
        return min(0.999, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


def _averaged(seed: int, steps: int) -> dict[str, Any]:
    training = Training(seed)
    average = Average(training.model)
    for _ in range(steps):
        training.step()
        average.update(training.model)
    return training.state | {"ema": average}


def test_r46_raw_and_averaged_weights_are_two_parts() -> None:
    saved, live = _averaged(1, 5), _averaged(2, 0)
    restore(save(saved), live)
    raw, average = live["model"].state_dict(), live["ema"].model.state_dict()
    assert all(map(torch.equal, raw.values(), saved["model"].state_dict().values()))
    assert all(map(torch.equal, average.values(), saved["ema"].model.state_dict().values()))
    assert not torch.equal(raw["0.weight"], average["0.weight"])


def test_r46_torchs_own_averaged_model_is_a_part_like_any_other() -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        average = torch.optim.swa_utils.AveragedModel(model)
        return {"model": model, "ema": average, "optimizer": torch.optim.SGD(model.parameters(), lr=1)}

    saved, live = make(), make()
    saved["ema"].update_parameters(saved["model"])
    stored = save(saved)
    assert "ema/module.weight" in {entry.name for entry in stored.layout.tensors}
    restore(stored, live)
    assert_same(save(live), stored)
    assert int(live["ema"].n_averaged) == 1


def test_r47_the_counter_of_an_average_is_kept() -> None:
    saved, live = _averaged(1, 5), _averaged(2, 0)
    restore(save(saved), live)
    assert live["ema"].updates == 5
    assert live["ema"].decay == saved["ema"].decay
