"""A restore is checked as a whole before it touches anything, and is put back where an object refuses at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import CkptdError, MismatchError, StateError
from ckptd_client.capture import register_codec
from tests.client.roundtrip import assert_same, restore, save


class Counted:
    """Takes its state only when told so."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.buffer = torch.full((2,), float(n))
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["n"] < 5:
            raise RuntimeError("not mine")
        self.n = state["n"]
        self.buffer.copy_(state["buffer"])


def everything(n: int) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, n)
    return {"first": Counted(n), "second": Counted(n), "model": model, "n": n, "list": [n]}


def test_an_object_that_refuses_leaves_the_state_as_it_was() -> None:
    stored, state = save(everything(1)), everything(9)
    before = save(state)
    state["second"].refuses = True
    with pytest.raises(CkptdError, match=r"second: the object does not take what was saved: RuntimeError: not mine"):
        restore(stored, state)
    assert_same(save(state), before)
    state["second"].refuses = False
    restore(stored, state)
    assert_same(save(state), stored)


def test_an_object_that_cannot_even_be_put_back_is_named() -> None:
    class Broken(Counted):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("never")

    with pytest.raises(MismatchError, match="not put back either: b"):
        restore(save({"b": Broken(1)}), {"b": Broken(2)})


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def decode_money(cents: int) -> Money:
    if cents < 0:
        raise ValueError("a debt")
    return Money(cents)


def test_a_codec_that_refuses_leaves_the_state_as_it_was() -> None:
    register_codec(Money, "money", lambda money: money.cents, decode_money)
    stored = save(everything(1) | {"money": Money(-1)})
    state = everything(9) | {"money": Money(5)}
    before = save(state)
    with pytest.raises(StateError, match="codec 'money' does not take what was saved: ValueError: a debt"):
        restore(stored, state)
    assert_same(save(state), before)


def test_one_codec_for_a_class_and_one_class_for_a_name() -> None:
    class Other:
        pass

    with pytest.raises(CkptdError, match="'money'"):
        register_codec(Other, "money", lambda other: 0, lambda value: Other())


def test_tensors_of_objects_come_as_memory_of_their_own() -> None:
    class Keeps:
        def __init__(self) -> None:
            self.kept: dict[str, Any] = {"t": torch.ones(2)}

        def state_dict(self) -> dict[str, Any]:
            return self.kept

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.kept = state

    stored, fresh = save({"k": Keeps()}), Keeps()
    restore(stored, {"k": fresh})
    stored.shard[:] = bytes(len(stored.shard))
    assert fresh.kept["t"].tolist() == [1, 1]


def test_nothing_is_applied_in_part_when_one_tensor_does_not_fit() -> None:
    state = everything(9) | {"extra": torch.zeros(3)}
    before = save(state)
    with pytest.raises(MismatchError, match=r"extra \(shape \(4,\) in the checkpoint, \(3,\) here\)"):
        restore(save(everything(1) | {"extra": torch.zeros(4)}), state)
    assert_same(save(state), before)
    report = restore(save(everything(1) | {"extra": torch.zeros(4)}), state, strict=False).report
    assert [name for name, _ in report.skipped] == ["extra"]
    assert state["n"] == 1
