"""Family (a), values and keys: what is no tensor returns with its types, or is refused by its path."""

from __future__ import annotations

import copy
import dataclasses
import enum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.errors import FormatError, MismatchError, StateError
from ckptd_client.capture import State, register_codec
from tests.client.roundtrip import assert_fixed_point, restore, save


def test_r13_lists_get_their_length_from_the_checkpoint() -> None:
    stored = save({"log": [{"a": 1}, {"b": 2, "t": torch.ones(2)}], "short": [1]})
    log: list[Any] = []
    short = [7, 8, 9]
    state: dict[str, Any] = {"log": log, "short": short}
    restore(stored, state)
    assert state["log"] is log
    assert log[0] == {"a": 1}
    assert torch.equal(log[1]["t"], torch.ones(2))
    assert short == [1]


def test_r13_an_object_in_a_list_is_never_dropped() -> None:
    modules = [nn.Linear(1, 1), nn.Linear(1, 1)]
    with pytest.raises(MismatchError, match="missing from the checkpoint: nets/~l1"):
        restore(save({"nets": modules[:1]}), {"nets": modules})
    restore(save({"nets": modules[:1]}), {"nets": modules}, strict=False)
    assert len(modules) == 2


ODD_KEYS: dict[Any, Any] = {
    1: "x",
    "1": "y",
    True.__class__: "dropped below",
    None: "none",
    1.5: "float",
    (1, "a", (None,)): "tuple",
    b"1": "bytes",
    -0.0: "minus zero",
    2**80: "huge",
}
del ODD_KEYS[bool]


def test_r14_keys_keep_their_types() -> None:
    state: dict[str, Any] = {"d": {}, "flags": {}}
    assert_fixed_point({"d": dict(ODD_KEYS), "flags": {True: 1, False: 0, "True": 2}}, state)
    assert list(state["d"].items()) == list(ODD_KEYS.items())
    assert [type(key) for key in state["d"]] == [type(key) for key in ODD_KEYS]
    assert [type(key) for key in state["flags"]] == [bool, bool, str]


def test_r14_a_multi_step_scheduler_is_a_fixed_point() -> None:
    def make() -> dict[str, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        return {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [25, 50]), "optimizer": optimizer}

    fresh = make()
    assert_fixed_point(make(), fresh)
    assert fresh["scheduler"].milestones == {25: 1, 50: 1}
    assert_fixed_point(fresh, make())


def test_r15_keys_that_differ_in_type_only_have_their_own_tensors() -> None:
    def make(values: list[float]) -> dict[str, Any]:
        a, b, c, d, e = (torch.tensor([value]) for value in values)
        return {"x": {0: a, "0": b, "a.b": c, "a": {"b": d}, "a/b": e}}

    fresh = make([0, 0, 0, 0, 0])
    restore(save(make([1, 2, 3, 4, 5])), fresh)
    x = fresh["x"]
    assert [float(t) for t in (x[0], x["0"], x["a.b"], x["a"]["b"], x["a/b"])] == [1, 2, 3, 4, 5]


def test_r16_plain_values_are_set_in_the_callers_own_containers() -> None:
    stored = save({"epoch": 20, "nested": {"best": 0.5, "seen": [1, 2], "pair": (3, 4)}})
    nested: dict[str, Any] = {"best": 0.0, "seen": [], "pair": (0, 0)}
    state: dict[str, Any] = {"epoch": 0, "nested": nested}
    prepared = restore(stored, state)
    assert state["epoch"] == 20
    assert nested == {"best": 0.5, "seen": [1, 2], "pair": (3, 4)}
    assert state["nested"] is nested
    assert prepared.values["epoch"] == 20


def test_r16_what_cannot_be_set_is_reported() -> None:
    nested = {"n": 0}
    state = MappingProxyType({"epoch": 0, "nested": nested})
    report = restore(save({"epoch": 20, "nested": {"n": 5}}), state).report
    assert nested == {"n": 5}
    assert [name for name, _ in report.skipped] == ["epoch"]
    assert "epoch" not in report.loaded


@pytest.mark.parametrize(
    "key",
    ["mlp/~/linear_0", "../x", "/abs", "con", "", " ", "a\\b", "🧪", "é", "e\u0301", "\ud800", "a\nb", "~e", "~0"],
)
def test_r17_keys_of_any_spelling_are_kept_inside_the_documents(key: str) -> None:
    fresh = {"x": {key: torch.zeros(2), "n": {key: 0}}}
    assert_fixed_point({"x": {key: torch.ones(2), "n": {key: 5}}}, fresh)
    assert fresh["x"] == {key: fresh["x"][key], "n": {key: 5}}
    assert torch.equal(fresh["x"][key], torch.ones(2))


def test_r17_composed_and_decomposed_accents_are_two_keys() -> None:
    fresh = {"x": {"é": torch.zeros(1), "e\u0301": torch.zeros(1)}}
    restore(save({"x": {"é": torch.tensor([1.0]), "e\u0301": torch.tensor([2.0])}}), fresh)
    assert [float(value) for value in fresh["x"].values()] == [1, 2]


@pytest.mark.parametrize("name", ["", 3, None, "\ud800", "x" * 5000, "rng"])
def test_r17_parts_whose_name_cannot_be_kept_are_refused_at_once(name: Any) -> None:
    with pytest.raises(StateError):
        State({name: 1}, world=1, rng=True)


def test_r21_integers_of_any_size_return_exactly() -> None:
    numbers = {"samples": 2**31 + 7, "big": 2**80, "neg": -(2**63), "past53": 2**53 + 1, "flag": True}
    fresh: dict[str, Any] = {"n": dict.fromkeys(numbers, 0)}
    assert_fixed_point({"n": numbers}, fresh)
    assert fresh["n"] == numbers
    assert type(fresh["n"]["flag"]) is bool


# Objects


class Phase(enum.Enum):
    WARM = "warm"
    LONG = (1, 2)


@dataclasses.dataclass
class Progress:
    done: int
    mean: torch.Tensor


class Unregistered:
    pass


def test_r22_what_has_no_codec_is_named_before_anything_is_written() -> None:
    for value in (lambda x: x, Unregistered(), Progress(1, torch.zeros(1)), np.array(["a"]), np.array([object()])):
        with pytest.raises(StateError, match="part/deep/~l1"):
            save({"part": {"deep": [0, value]}})


def test_r22_schedulers_with_functions_are_kept_or_refused_with_a_path() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, scale_fn=lambda x: 1.0, cycle_momentum=False)
    plain = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5])
    assert_fixed_point({"s": plain}, {"s": plain})
    assert_fixed_point({"s": cyclic}, {"s": cyclic})
    cyclic.helper = lambda: 1  # type: ignore[attr-defined]
    with pytest.raises(StateError, match=r"s/helper: no codec for a value of type builtins\.function"):
        save({"s": cyclic})


def test_r22_known_kinds_return_as_what_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    values: dict[str, Any] = {
        "phase": Phase.LONG,
        "np": [np.float32(0.1), np.int64(-3), np.bool_(True), np.complex128(1 + 2j), np.float16(np.nan)],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        "big endian": np.arange(3, dtype=">f8"),
        "generator": generator,
        "torch": [torch.float16, torch.device("cuda:3"), torch.Size([2, 3])],
        "sets": [{1, 2}, frozenset({"a"})],
    }
    expected = torch.rand(3, generator=copy.copy(generator).set_state(generator.get_state()))
    fresh: dict[str, Any] = {"v": {"generator": torch.Generator()}}
    mine = fresh["v"]["generator"]
    save_again = save({"v": values})
    restore(save_again, fresh)
    got = fresh["v"]
    assert got["phase"] is Phase.LONG
    assert [(type(x), x.tobytes()) for x in got["np"]] == [(type(x), x.tobytes()) for x in values["np"]]
    for name in ("array", "big endian"):
        assert got[name].dtype == values[name].dtype
        assert np.array_equal(got[name], values[name])
    assert got["generator"] is mine
    assert torch.equal(torch.rand(3, generator=mine), expected)
    assert got["torch"] == values["torch"]
    assert got["sets"] == values["sets"]


def test_r22_an_enum_comes_only_from_code_that_is_there() -> None:
    stored = save({"v": Phase.WARM})
    forged = dataclasses.replace(stored, tree=stored.tree.replace(b":Phase", b":Progress"))
    for tree in (forged.tree, stored.tree.replace(b":Phase", b":Missing"), stored.tree.replace(b"test_a", b"absent")):
        with pytest.raises(FormatError, match="enum"):
            restore(dataclasses.replace(stored, tree=tree), {"v": Phase.WARM})


def test_r22_a_registered_codec_keeps_a_foreign_class() -> None:
    register_codec(Progress, "progress", lambda p: {"done": p.done, "mean": p.mean}, lambda d: Progress(**d))
    fresh: dict[str, Any] = {"p": [Progress(0, torch.zeros(2))]}
    assert_fixed_point({"p": [Progress(3, torch.ones(2))]}, fresh)
    assert fresh["p"][0].done == 3
    assert torch.equal(fresh["p"][0].mean, torch.ones(2))
    unknown = save({"p": Progress(3, torch.ones(2))})
    unknown = dataclasses.replace(unknown, tree=unknown.tree.replace(b'"progress"', b'"elsewhere"'))
    with pytest.raises(FormatError, match="elsewhere"):
        restore(unknown, {"p": None})
