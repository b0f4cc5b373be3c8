"""What a checkpointer is asked for is checked before anything is done: no daemon, no store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from ckptd.errors import ConfigError, UsageError
from ckptd_client import Checkpointer, Tier
from ckptd_client.agreement import Agreement
from ckptd_client.capture import State
from ckptd_client.capture.selection import Selection
from ckptd_client.meeting import OwnStore, TorchStore
from ckptd_client.settings import (
    check_metric,
    check_step,
    declared,
    loader_of,
    refuse_patterns_of_nothing,
    selections,
    to_be_finite,
)

STATE = {"model": torch.nn.Linear(2, 2)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_full": "waite"}, r"on_full='waite' \(one of 'wait', 'skip', 'fail'; near is 'wait'\)"),
        ({"on_error": "rase"}, r"on_error='rase' \(one of 'log', 'raise'; near is 'raise'\)"),
        ({"check": "some"}, r"check='some' \(one of 'sample', 'full', 'off'"),
        ({"log_ranks": 1}, "log_ranks=1 .one of 'first'"),
        ({"every_steps": "5"}, "every_steps='5' is not an integer"),
        ({"every": "5"}, "every='5' is not a positive number"),
        ({"slots": 2.5}, r"slots=2\.5 is not an integer"),
        ({"max_wait": None}, "max_wait=None is not a number"),
        ({"keep": 3}, r"keep=3 is no Keep .*Keep\(last=3\)"),
        ({"loss_rules": {}}, "loss_rules={} are no LossRules"),
        ({"replicated": "model"}, "replicated='model' is no list of patterns"),
        ({"check_finite": [""]}, "check_finite=.* is no list of patterns"),
        ({"verify_load": "nosuch:load"}, "verify_load='nosuch:load': there is no module nosuch"),
        ({"verify_load": "ckptd.nosuch:load"}, r"there is no module ckptd\.nosuch"),
        ({"verify_load": "ckptd.errors:load"}, r"ckptd\.errors has no load"),
        ({"state": {}}, "state={} has nothing"),
        ({"state": torch.nn.Linear(1, 1)}, "state is a Linear, not a dict"),
        ({"url": None}, "url=None names no root"),
        ({"url": Path("/x")}, r"names no root.*as a str"),
        ({"url": ["/x", 3]}, "names no root"),
        ({"url": Tier("/x", keep=3)}, "keep=3 of /x is no Keep"),  # type: ignore[arg-type]
        ({"url": "file://tmp/x"}, "names a host, 'tmp'.*file:///tmp/x"),
    ],
)
def test_an_option_is_named_with_what_it_may_be(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"url": str(tmp_path / "run"), "state": STATE, "socket": tmp_path / "daemon.sock", **settings}
    with pytest.raises(ConfigError, match=said):
        Checkpointer(given.pop("url"), given.pop("state"), start_daemon=False, **given)
    assert list(tmp_path.iterdir()) == []


def test_what_is_right_passes() -> None:
    assert loader_of(None) is None
    assert loader_of("json:loads") is not None
    assert loader_of("xml.dom.minidom:parse") is not None
    assert declared(True) is True
    assert to_be_finite(False) is False
    for fine in (1, None, torch.zeros(1, 1), np.float32(3), np.ones(1), True):
        check_metric(1, "a", fine)
    check_step(3, 3)


@pytest.mark.parametrize("value", ["abc", "1.5", [1.0], torch.zeros(2), np.ones(3), {}])
def test_a_metric_is_a_number(value: object) -> None:
    with pytest.raises(UsageError, match=r"step 7: loss is .*metrics are numbers"):
        check_metric(7, "loss", value)


def test_steps_do_not_go_backwards() -> None:
    with pytest.raises(UsageError, match="step 3 comes after step 5: steps went backwards"):
        check_step(3, 5)


@pytest.mark.parametrize("option", ["include", "exclude", "cast"])
def test_a_single_string_is_no_list_of_patterns(option: str) -> None:
    given: dict[str, Any] = {"include": None, "exclude": (), "cast_": False}
    given["cast_" if option == "cast" else option] = "model"
    with pytest.raises(ConfigError, match=rf"{option}='model' is no list of patterns.*{option}=\[\"model"):
        selections(State(STATE, world=1, rng=False), **given, weights_only=False)


def test_weights_of_no_module_are_none() -> None:
    with pytest.raises(ConfigError, match="the state has no module"):
        selections(State({"x": torch.zeros(1)}, world=1, rng=False), None, (), False, weights_only=True)


def state_with_optimizer() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    return {"model": model, "nested": {"optim": torch.optim.AdamW(model.parameters()), "x": torch.zeros(1)}, "new": {}}


def judge(agreement: Agreement, parts: dict[str, Any], pattern: str) -> None:
    state = State(parts, world=1, rng=False)
    options = {"replicated": (pattern,), "check_finite": Selection([pattern])}
    refuse_patterns_of_nothing(agreement, state, state.capture(), options)


@pytest.mark.parametrize("pattern", ["model/*", "model", "*exp_avg*", "nested/optim/state/*", "nested/x", "new/later"])
def test_patterns_of_what_is_there_or_comes_with_the_optimizers(pattern: str) -> None:
    judge(Agreement(OwnStore(), 0, 1), state_with_optimizer(), pattern)


@pytest.mark.parametrize("pattern", ["modle/*", "model/wieght", "nested/y", "optim/*"])
def test_patterns_of_nothing(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"replicated: nothing is called"):
        judge(Agreement(OwnStore(), 0, 1), state_with_optimizer(), pattern)


@pytest.mark.parametrize(("pattern", "refused"), [("only/*", False), ("nowhere/*", True)])
def test_a_pattern_may_be_of_another_ranks_tensors(pattern: str, refused: bool) -> None:
    store, errors = TorchStore(HashStore(), "test/"), []

    def rank(number: int) -> None:
        parts = {"model": torch.zeros(1)} | ({"only": {"x": torch.zeros(1)}} if number else {})
        try:
            judge(Agreement(store, number, 2), parts, pattern)
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(errors) == (2 if refused else 0)
    assert all("'nowhere/*'" in error for error in errors)
