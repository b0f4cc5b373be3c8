"""What does not fit is refused by name, and the error says what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import ConfigError, MismatchError
from ckptd_client.capture.selection import Selection
from ckptd_client.decision import judged
from tests.client.roundtrip import prepare, restore, save


def trained(
    optimizer: Callable[[Any], torch.optim.Optimizer], *, dtype: torch.dtype = torch.float32, steps: int = 1
) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).to(dtype)
    made = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        made.step()
    return {"model": model, "optim": made, "epoch": 3}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("include", "exclude", "near"),
    [
        (["modle/*"], (), "near is model"),
        (["modle"], (), "near is model"),
        (["model/0.weihgt"], (), "near is model/0.weight"),
        (None, ["optimizer/*"], "near is optim"),
        (None, ["zzzzzz"], "patterns stand for names such as"),
        (["model/*", "epcoh"], (), "near is epoch"),
    ],
)
def test_a_pattern_that_stands_for_nothing(include: list[str] | None, exclude: list[str], near: str) -> None:
    stored, state = save(trained(sgd)), trained(sgd)
    before = state["model"][0].weight.clone()
    with pytest.raises(ConfigError, match=near) as refused:
        prepare(stored, state, selection=Selection(include, exclude))
    assert repr([*(include or ()), *exclude][-1]) in str(refused.value)
    assert torch.equal(state["model"][0].weight, before)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(["model"]),
        Selection(["model/1.*", "optim/state/1.weight", "epoch"]),
        Selection(["optim/param_groups"]),
        Selection(None, ["optim", "epoch"]),
        Selection(["*"], ["model/0.bias"]),
    ],
)
def test_a_pattern_that_stands_for_something(selection: Selection) -> None:
    stored, state = save(trained(sgd)), trained(sgd)
    assert not prepare(stored, state, selection=selection).unmatched


def test_what_only_another_rank_has_is_for_all_to_judge() -> None:
    stored, state = save(trained(sgd)), trained(sgd)
    found = prepare(stored, state, selection=Selection(["modle/*"]), world=2)
    assert found.unmatched == {"modle/*": ["model"]}


def test_a_pattern_stands_for_nothing_only_where_no_rank_has_it() -> None:
    def vote(unmatched: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "refusal": None,
            "unexpected": [],
            "unmatched": unmatched,
            "everything": False,
            "source": "memory",
            "unused": [],
        }

    votes = [vote({"modle": ["model"], "head": []}), vote({"modle": ["mode", "model"], "tail": []})]
    assert judged(votes)["unmatched"] == {"modle": ["model", "mode"]}


def test_state_of_another_optimizer_is_refused() -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        sgd,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
    ]
    for saver in kinds:
        stored = save(trained(saver))
        for taker in kinds:
            state = trained(taker, steps=0)
            if (saver, taker) in ((torch.optim.NAdam, torch.optim.AdamW), (saver, saver)):
                assert prepare(stored, state).report.loaded
                continue
            with pytest.raises(MismatchError, match=r"optim \(it is of another optimizer: the checkpoint's has"):
                prepare(stored, state)
            report = prepare(stored, state, strict=False).report
            assert not any(name.startswith("optim") for name in report.loaded)
            assert "model/0.weight" in report.loaded
            assert report.skipped[0][0] == "optim"
            assert prepare(stored, state, selection=Selection(None, ["optim"])).report.loaded


def test_adamw_into_sgd_changes_nothing_and_names_both() -> None:
    stored, state = save(trained(torch.optim.AdamW)), trained(sgd, steps=0)
    with pytest.raises(MismatchError, match=r"has betas, eps.*SGD has dampening, momentum.*exclude=\[\"optim\"\]"):
        restore(stored, state)
    assert not state["optim"].state
    assert "betas" not in state["optim"].param_groups[0]


def test_a_setting_that_one_side_does_not_know_is_a_newer_release() -> None:
    saved = trained(torch.optim.AdamW)
    for group in saved["optim"].param_groups:
        group["initial_lr"] = 0.1
        group["newer"] = 1.5
    restore(save(saved), trained(torch.optim.AdamW))
    with_more = trained(torch.optim.AdamW)
    with_more["optim"].defaults["newest"] = 0.5
    restore(save(trained(torch.optim.AdamW)), with_more)


def test_another_dtype_is_a_case_for_cast() -> None:
    stored, state = save({"w": torch.zeros(3)}), {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(MismatchError, match=r'cast=\["w"\]') as refused:
        restore(stored, state)
    assert "exclude" not in refused.value.hint


@pytest.mark.parametrize(
    "live", [{"b": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(1)}, {"a": torch.zeros(4)}]
)
def test_another_name_or_shape_is_a_case_for_exclude(live: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=r"exclude=\[.*strict=False") as refused:
        restore(save({"a": torch.zeros(3)}), live)
    assert "cast" not in refused.value.hint
