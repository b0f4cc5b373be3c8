"""Optimizers and schedulers of torch: restored as they were, and going on as they would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ckptd.errors import StateError
from ckptd_client.capture import State
from tests.client.roundtrip import assert_same, capture, restore, save, seed_all

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "Adam foreach, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def make(name: str, seed: int) -> dict[str, Any]:
    seed_all(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}


def train(state: dict[str, Any], steps: int) -> None:
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(7))

    def closure() -> torch.Tensor:
        state["optimizer"].zero_grad()
        loss = state["model"](data).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        state["optimizer"].step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_every_optimizer_goes_on_bit_for_bit(name: str, before: int) -> None:
    state = make(name, 1)
    train(state, before)
    stored = save(state)
    train(state, 2)
    expected = save(state)
    for steps_of_its_own in (0, 1):
        fresh = make(name, 2)
        train(fresh, steps_of_its_own)
        restore(stored, fresh)
        assert_same(save(fresh), stored)
        train(fresh, 2)
        assert_same(save(fresh), expected)


def test_restoring_into_a_later_state_goes_back_to_none() -> None:
    state = make("AdamW", 1)
    stored = save(state)
    train(state, 1)
    restore(stored, state)
    assert not state["optimizer"].state


def test_new_state_lies_as_its_parameter_does() -> None:
    def convolution() -> dict[str, Any]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state, fresh = convolution(), convolution()
    state["model"](torch.randn(1, 3, 5, 5)).sum().backward()
    state["optimizer"].step()
    restore(save(state), fresh)
    moment = fresh["optimizer"].state[fresh["model"].weight]["exp_avg"]
    assert moment.stride() == state["optimizer"].state[state["model"].weight]["exp_avg"].stride()
    assert fresh["optimizer"].state[fresh["model"].weight]["step"].device.type == "cpu"


def test_two_modules_with_the_same_names_keep_apart() -> None:
    def pair() -> dict[str, Any]:
        a, b = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*b.parameters(), *a.parameters()], lr=0.1, momentum=0.9)
        for parameter in (*a.parameters(), *b.parameters()):
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        return {"nets": {"a": a, "b": b}, "optimizer": optimizer}

    state, fresh = pair(), pair()
    stored = save(state)
    restore(stored, fresh)
    assert_same(save(fresh), stored)
    for net in "ab":
        mine, saved = fresh["nets"][net].weight, state["nets"][net].weight
        assert torch.equal(
            fresh["optimizer"].state[mine]["momentum_buffer"], state["optimizer"].state[saved]["momentum_buffer"]
        )


def test_an_average_with_the_models_names_does_not_change_the_optimizers() -> None:
    model, average = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    leaves = capture({"optimizer": optimizer, "ema": average, "model": model}).leaves
    assert leaves[0].name == "optimizer/state/weight/momentum_buffer"


def test_names_given_to_the_optimizer_serve_where_no_module_is_in_the_state() -> None:
    def named(reverse: bool) -> dict[str, Any]:
        parameters = list(nn.Linear(2, 2).named_parameters())[:: -1 if reverse else 1]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        return {"optimizer": optimizer}

    state, fresh = named(False), named(True)
    restore(save(state), fresh)
    ours, theirs = (list(s["optimizer"].state.values()) for s in (state, fresh))
    assert torch.equal(ours[0]["momentum_buffer"], theirs[1]["momentum_buffer"])
    assert fresh["optimizer"].param_groups[0]["param_names"] == ["bias", "weight"]


def test_plain_numbers_in_the_state_are_taken_anew_at_every_capture() -> None:
    state = make("SGD", 1)
    parameter = state["model"][0].weight
    state["optimizer"].state[parameter] = {"step": 1, "moment": torch.zeros(1), "best": None}
    live = State(state, world=1, rng=False)
    first = live.capture()
    state["optimizer"].state[parameter] |= {"step": 2**70, "best": 0.5}
    assert b'"0x400000000000000000"' in live.capture().tree
    state["optimizer"].state[parameter]["step"] = 3
    assert b'["step",3]' in live.capture().tree
    assert b'["step",1]' in first.tree


def test_state_of_a_forgotten_parameter_is_refused() -> None:
    state = make("SGD momentum", 1)
    train(state, 1)
    del state["optimizer"].param_groups[0]["params"][0]
    with pytest.raises(StateError, match="optimizer: state of a parameter that is in no group"):
        save(state)


def test_state_beside_the_parameters_is_kept() -> None:
    state, fresh = make("SGD", 1), make("SGD", 2)
    state["optimizer"].state["calls"] = {"n": 3, "t": torch.ones(2)}
    stored = save(state)
    restore(stored, fresh)
    assert_same(save(fresh), stored)


def test_an_optimizer_with_a_state_dict_of_its_own_is_asked_for_it() -> None:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 5}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.mine = state["mine"]

    model = nn.Linear(1, 1)
    optimizer = Own(model.parameters(), lr=0.1)
    restore(save({"o": optimizer}), {"o": optimizer})
    assert optimizer.mine == 5
    assert State({"o": {"x": [optimizer]}}, world=1, rng=False).optimizers() == [optimizer]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "cosine restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, mode="exp_range", gamma=0.9, step_size_up=2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "lambda object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 1)], milestones=[2]
    ),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


class Decay:
    def __init__(self) -> None:
        self.factor = 0.9

    def __call__(self, epoch: int) -> float:
        return float(self.factor**epoch)


def scheduled(name: str, lr: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr, momentum=0.9)
    return {"scheduler": SCHEDULERS[name](optimizer), "optimizer": optimizer}


def rates(state: dict[str, Any], steps: int) -> list[Any]:
    seen: list[Any] = []
    for _ in range(steps):
        state["optimizer"].step()
        state["scheduler"].step()
        group = state["optimizer"].param_groups[0]
        seen.append((group["lr"], group["momentum"]))
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_as_it_would_have(name: str) -> None:
    state, fresh = scheduled(name, 0.1), scheduled(name, 0.7)
    rates(state, 2)
    stored = save(state)
    restore(stored, fresh)
    assert_same(save(fresh), stored)
    assert rates(fresh, 4) == rates(state, 4)


def test_a_plateau_scheduler_goes_on_as_it_would_have() -> None:
    def plateau(lr: float) -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
        return {"optimizer": optimizer, "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)}

    state, fresh = plateau(0.1), plateau(0.7)
    assert_same(save(state), save(state))
    for value in (1.0, 2.0):
        state["scheduler"].step(value)
    stored = save(state)
    restore(stored, fresh)
    assert_same(save(fresh), stored)
    for each in (state, fresh):
        each["scheduler"].step(3.0)
    assert fresh["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)
