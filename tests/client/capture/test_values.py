"""Plain values in nested containers, and the whole way through a new process."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ckptd.errors import FormatError, MismatchError, StateError
from ckptd.format.common_tree import Merge
from ckptd_client.capture import SavedTensor, State
from ckptd_client.capture.selection import Selection
from ckptd_client.capture.stored import Ranks
from tests.client.roundtrip import Reread, assert_same, bits, capture, prepare, restore, save

ROOT = Path(__file__).parents[3]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
tensors = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.integers(-9, 9), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
values = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
    ),
    max_leaves=12,
)
SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, nan included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(x, y) for (a, x), (b, y) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    return bool(one == other)


@SETTINGS
@given(values)
def test_any_nested_value_returns_exactly_into_an_empty_state(value: Any) -> None:
    stored = save({"v": value})
    fresh: dict[str, Any] = {"v": None}
    restore(stored, fresh)
    assert same(fresh["v"], value)
    assert_same(save(fresh), stored)


@SETTINGS
@given(values, values)
def test_any_nested_value_returns_into_any_other_or_not_at_all(value: Any, other: Any) -> None:
    stored, before = save({"v": value}), save({"v": other})
    state = {"v": other}
    try:
        restore(stored, state)
    except MismatchError:
        assert_same(save(state), before)
    else:
        again = save(state)
        assert again.shard == stored.shard
        # A container of the caller stays what it is: a dict or an ordered one.
        assert again.tree.replace(b"odict", b"dict") == stored.tree.replace(b"odict", b"dict")


@SETTINGS
@given(st.lists(keys, min_size=1, max_size=6, unique_by=lambda key: (repr(type(key)), repr(key))))
def test_names_of_tensors_are_injective(some: list[Any]) -> None:
    state = {"x": [{key: torch.zeros(1)} for key in some], "y": {}}
    for key in some:
        state["y"].setdefault(key, torch.zeros(2))  # type: ignore[union-attr]
    leaves = capture(state).leaves
    assert len({leaf.name for leaf in leaves}) == len(leaves) == len(some) + len(state["y"])


@SETTINGS
@given(values, st.data())
def test_a_damaged_tree_is_an_error_and_nothing_else(value: Any, data: st.DataObject) -> None:
    stored = save({"v": value})
    at = data.draw(st.integers(0, len(stored.tree) - 1))
    tree = stored.tree[:at] + data.draw(st.binary(min_size=1, max_size=3)) + stored.tree[at + 1 :]
    live = State({"v": value}, world=1, rng=False)
    with contextlib.suppress(FormatError, MismatchError, StateError):
        live.prepare(Reread(replace(stored, tree=tree), Ranks()), strict=True).apply()


def test_counters_and_sets_keep_their_kind() -> None:
    state = {"v": {"c": Counter(a=2), "s": {3, 1}, "f": frozenset("ab"), "b": bytearray(b"x")}}
    fresh: dict[str, Any] = {"v": {}}
    restore(save(state), fresh)
    assert fresh == state
    assert [type(value) for value in fresh["v"].values()] == [Counter, set, frozenset, bytearray]


def test_tensors_stay_the_same_objects_within_tuples_and_lists() -> None:
    tensor, deep = torch.zeros(2), torch.zeros(1)
    state: dict[str, Any] = {"pair": (1, tensor, [deep])}
    restore(save({"pair": (2, torch.ones(2), [torch.ones(1)])}), state)
    assert state["pair"][0] == 2
    assert state["pair"][1] is tensor
    assert state["pair"][2][0] is deep
    assert tensor.tolist() == [1, 1]


def test_tied_values_that_are_made_anew_stay_tied() -> None:
    shared = torch.ones(2)
    fresh: dict[str, Any] = {"v": None}
    restore(save({"v": [shared, shared]}), fresh)
    assert fresh["v"][0] is fresh["v"][1]
    assert fresh["v"][0] is not shared


def test_what_was_restored_shares_no_memory_with_what_was_read() -> None:
    stored = save({"v": torch.ones(2)})
    fresh: dict[str, Any] = {"v": None}
    restore(stored, fresh)
    stored.shard[:] = bytes(len(stored.shard))
    assert fresh["v"].tolist() == [1, 1]


@pytest.mark.parametrize("live", [torch.zeros(1), torch.Generator()])
def test_what_is_updated_in_place_must_be_there_on_both_sides(live: object) -> None:
    with pytest.raises(MismatchError, match=r"v/x .*something else in the checkpoint"):
        restore(save({"v": {"x": 3}}), {"v": {"x": live}})


def test_keys_that_are_not_in_the_checkpoint_are_missing() -> None:
    state: dict[str, Any] = {"v": {"old": 1, "new": 2}}
    stored = save({"v": {"old": 5}})
    with pytest.raises(MismatchError, match="missing from the checkpoint: v/new"):
        restore(stored, state)
    report = restore(stored, state, strict=False).report
    assert state == {"v": {"old": 5, "new": 2}}
    assert report.missing == ("v/new",)


def test_parts_on_one_side_only_are_named() -> None:
    stored = save({"a": 1, "b": 2})
    state: dict[str, Any] = {"b": 0, "c": 0}
    with pytest.raises(MismatchError, match="missing from the checkpoint: c; unexpected in the checkpoint: a"):
        restore(stored, state)
    assert state == {"b": 0, "c": 0}
    report = restore(stored, state, strict=False).report
    assert state == {"b": 2, "c": 0}
    assert (report.missing, report.unexpected, report.loaded) == (("c",), ("a",), ("b",))


def test_preparing_changes_nothing_and_gives_the_whole_tree() -> None:
    stored = save({"n": 5, "t": {"x": torch.ones(2)}})
    state: dict[str, Any] = {"n": 0, "t": {"x": torch.zeros(2)}}
    prepared = prepare(stored, state)
    assert state["n"] == 0
    assert state["t"]["x"].tolist() == [0, 0]
    assert prepared.values == {"n": 5, "t": {"x": SavedTensor("t/x")}}


NEW_PROCESS = """
import sys
import weakref
from pathlib import Path
from tests.client.capture.test_values import everything
from tests.client.roundtrip import Stored, restore, save
folder = Path(sys.argv[1])
stored = Stored(bytearray((folder / "shard").read_bytes()), (folder / "layout").read_bytes(),
                (folder / "tree").read_bytes(), ())
state = everything(2)
restore(stored, state, rng=True)
again = save(state, rng=True)
assert (again.shard, again.layout, again.tree) == (stored.shard, stored.layout, stored.tree)
"""


def everything(seed: int) -> dict[str, Any]:
    """A state of many kinds, trained a little."""
    from tests.cases.test_b_data import loader
    from tests.cases.test_b_resume import Training

    training = Training(seed).run(seed)
    odd = {"k": {1: "a", "1": {None: 2**80}}, "set": {"b", "a"}, "generator": torch.Generator().manual_seed(seed)}
    return training.state | {"odd": odd, "loader": loader(), "nested": [{"t": torch.full((3,), float(seed))}]}


def test_saving_what_a_new_process_restored_gives_the_checkpoint_again(tmp_path: Path) -> None:
    stored = save(everything(1), rng=True)
    (tmp_path / "shard").write_bytes(stored.shard)
    (tmp_path / "layout").write_bytes(stored.layout_bytes)
    (tmp_path / "tree").write_bytes(stored.tree)
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(stored.tree)["$"] == "dict"


class Holder:
    """An object whose state holds another object, which nothing could put back."""

    def __init__(self) -> None:
        self.inner = torch.nn.Linear(1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("value", [Holder(), deque([torch.nn.Linear(1, 1)])])
def test_objects_where_nothing_could_put_them_back_are_refused(value: object) -> None:
    with pytest.raises(StateError, match=r"v/.*no codec for a value of type torch"):
        save({"v": value})


def test_objects_within_dicts_lists_and_tuples_are_restored_in_place() -> None:
    def nested() -> dict[str, Any]:
        a, b, c = (torch.nn.Linear(1, 1) for _ in range(3))
        return {"v": {"a": a, "list": [b, 1], "tuple": (c, 2)}}

    state, fresh = nested(), nested()
    inner = fresh["v"]["tuple"][0]
    restore(save(state), fresh)
    assert_same(save(fresh), save(state))
    assert fresh["v"]["tuple"][0] is inner


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(StateError, match="is it a cycle"):
        save({"v": cycle})


def test_objects_that_left_the_state_are_let_go() -> None:
    state: dict[str, Any] = {"v": [torch.nn.Linear(1, 1)]}
    live = State(state, world=1, rng=False)
    live.capture()
    gone = weakref.ref(state["v"].pop())
    for _ in range(2):
        live.capture()
    gc.collect()
    assert gone() is None


# What is not taken


def lists_and_dicts(dict_: dict[str, Any], list_: list[Any], tuple_: tuple[Any, ...]) -> dict[str, Any]:
    return {"model": torch.nn.Linear(1, 1), "dict": dict_, "list": list_, "tuple": tuple_}


@pytest.mark.parametrize(
    ("live", "selection"),
    [
        (({}, [], ()), Selection(["model"])),
        (({"a": 9, "z": 8}, [9], (9,)), Selection(["model"])),
        (({"a": 9}, [9, 8, 7, 6], (9, 8, 7, 6)), Selection(None, ["dict", "list", "tuple"])),
    ],
)
def test_containers_that_are_not_taken_stay_as_they_are(live: tuple[Any, ...], selection: Selection) -> None:
    """Whatever the checkpoint has that is not there, and the other way round."""
    saved = lists_and_dicts({"a": 1, "t": torch.ones(2)}, [1, torch.ones(2), 3], (1, 2))
    fresh, expected = lists_and_dicts(*live), copy.deepcopy(lists_and_dicts(*live))
    prepare(save(saved), fresh, selection=selection).apply()
    assert torch.equal(fresh["model"].weight, saved["model"].weight)
    for name in ("dict", "list", "tuple"):
        assert fresh[name] == expected[name]


def test_what_is_taken_of_a_container_keeps_its_place() -> None:
    saved = {"dict": {"a": 1, "b": 2}, "list": [1, 2, 3], "tuple": (1, 2)}
    fresh: dict[str, Any] = {"dict": {}, "list": [], "tuple": (9,)}
    prepare(save(saved), fresh, selection=Selection(None, ["dict/a", "list/~l0", "list/~l2", "tuple/~l0"])).apply()
    assert fresh == {"dict": {"b": 2}, "list": [None, 2], "tuple": (9, 2)}


def test_what_was_each_ranks_own_leaves_nothing_where_there_was_nothing() -> None:
    """Taken by another number of ranks, with ``strict=False``."""
    merge = Merge()
    for rank in range(2):
        merge.add(msgspec.Raw(save({"d": {"own": rank, "same": 7}}).tree), {})
    common = replace(save({"d": {"own": 0, "same": 7}}), tree=bytes(merge.tree))
    fresh: dict[str, Any] = {"d": {}}
    report = restore(common, fresh, strict=False, saved_world=2).report
    assert fresh == {"d": {"same": 7}}
    assert [name for name, _ in report.skipped] == ["d/own"]
