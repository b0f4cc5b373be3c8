"""What state trees have in common does not depend on the order of ranks, and equal trees are not opened."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import FormatError
from ckptd.format import common_tree
from ckptd.format.common_tree import Merge
from ckptd.format.tree import PER_RANK, decode_json, decode_tree, encode_tree

DIFFERS = {"$": PER_RANK}


def raw(node: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(node))


def no_leaf(value: object, path: tuple[str, ...]) -> None:
    return None


def merged(*nodes: Any) -> Any:
    merge = Merge()
    for node in nodes:
        merge.add(raw(node), {})
    return msgspec.json.decode(merge.tree)


def of(*states: Any) -> Any:
    return merged(*(encode_tree(state, no_leaf) for state in states))


def test_dicts_are_united_in_order_of_first_appearance() -> None:
    assert of({"b": 1, "a": 2}, {"a": 2, "c": 3}, {"d": 4, "b": 1}) == encode_tree(
        {"b": 1, "a": 2, "c": 3, "d": 4}, no_leaf
    )
    assert of({"a": {"x": 1}}, {"a": {"y": 2}}) == encode_tree({"a": {"x": 1, "y": 2}}, no_leaf)
    assert of({1: "i"}, {"1": "s"}) == encode_tree({1: "i", "1": "s"}, no_leaf)
    both = of(OrderedDict(a=1), OrderedDict(b=2))
    assert both == encode_tree(OrderedDict(a=1, b=2), no_leaf)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1, 1),
        (1, 2, DIFFERS),
        (1, 1.0, DIFFERS),
        (True, 1, DIFFERS),
        (None, "x", DIFFERS),
        ([1, 2], [1, 3], [1, DIFFERS]),
        ([1, 2], [1], DIFFERS),
        ([1], {"$": "tuple", "v": [1]}, DIFFERS),
        ({"$": "tuple", "v": [1, 2]}, {"$": "tuple", "v": [1, 3]}, {"$": "tuple", "v": [1, DIFFERS]}),
        ({"$": "dict", "v": []}, [], DIFFERS),
        ({"$": "dict", "v": []}, {"$": "odict", "v": []}, DIFFERS),
        ({"$": "set", "v": [1]}, {"$": "set", "v": [2]}, DIFFERS),
        ({"$": "deque", "v": [1], "maxlen": 2}, {"$": "deque", "v": [2], "maxlen": 2}, DIFFERS),
        ({"$": "tensor", "v": "a"}, {"$": "tensor", "v": "a"}, {"$": "tensor", "v": "a"}),
        ({"$": "tensor", "v": "a"}, {"$": "tensor", "v": "b"}, DIFFERS),
        ({"$": "ndarray", "dtype": "<f4", "v": [1]}, {"$": "ndarray", "dtype": "<f4", "v": [2]}, DIFFERS),
        (DIFFERS, DIFFERS, DIFFERS),
        (DIFFERS, 1, DIFFERS),
        # What is malformed is nobody's to look into.
        ({"$": "tuple", "v": [1], "x": 1}, {"$": "tuple", "v": [2], "x": 1}, DIFFERS),
        ({"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[2]]}, DIFFERS),
        ({"$": "dict", "v": [["a", 1], ["a", 1]]}, {"$": "dict", "v": [["a", 1], ["a", 2]]}, DIFFERS),
        ({"v": 1}, {"v": 2}, DIFFERS),
    ],
)
def test_what_differs_is_the_ranks_own(one: Any, other: Any, expected: Any) -> None:
    assert merged(one, other) == expected
    assert merged(other, one) == expected
    assert merged(other, one, one, other) == expected


leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", 0.5])
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c", 1]), inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=8,
)


def unordered(node: Any) -> Any:
    """A typed node, with the keys of its dicts in one order."""
    if isinstance(node, list):
        return [unordered(item) for item in node]
    if isinstance(node, dict) and node.get("$") == "dict":
        return {"$": "dict", "v": sorted(([key, unordered(value)] for key, value in node["v"]), key=repr)}
    return {key: unordered(value) for key, value in node.items()} if isinstance(node, dict) else node


def plainly(nodes: Sequence[Any]) -> Any:
    """The rules over decoded nodes, without the module's shortcuts."""
    first = nodes[0]
    if all(node == first and repr(node) == repr(first) for node in nodes):
        return first
    tags = {node.get("$") if isinstance(node, dict) else type(node).__name__ for node in nodes}
    if tags == {"dict"}:
        keys = list(dict.fromkeys(repr(key) for node in nodes for key, _ in node["v"]))
        named = {repr(key): key for node in nodes for key, _ in node["v"]}
        values = {k: [value for node in nodes for key, value in node["v"] if repr(key) == k] for k in keys}
        return {"$": "dict", "v": [[named[k], plainly(values[k])] for k in keys]}
    children = [node["v"] if isinstance(node, dict) else node for node in nodes]
    if tags in ({"list"}, {"tuple"}) and len({len(found) for found in children}) == 1:
        items = [plainly(column) for column in zip(*children, strict=True)]
        return items if tags == {"list"} else {"$": "tuple", "v": items}
    return DIFFERS


@settings(max_examples=400)
@given(st.lists(states, min_size=1, max_size=4))
def test_the_order_of_ranks_shows_in_the_order_of_keys_only(found: list[Any]) -> None:
    nodes = [encode_tree(state, no_leaf) for state in found]
    expected = plainly(nodes)
    assert merged(*nodes) == expected
    for order in itertools.permutations(nodes):
        assert unordered(merged(*order)) == unordered(expected)
    # What is merged already changes nothing more.
    assert merged(expected, *nodes) == expected
    assert merged(*nodes, *nodes) == expected


def test_a_merged_tree_is_decoded_with_what_differs_as_a_leaf() -> None:
    def leaf(tag: str, members: dict[str, Any]) -> object:
        assert members == DIFFERS
        return tag

    node = of({"a": [1, 2], "b": (1,)}, {"a": [1, 3], "b": (2,)})
    assert decode_tree(decode_json(msgspec.json.encode(node)), leaf) == {"a": [1, PER_RANK], "b": (PER_RANK,)}
    with pytest.raises(FormatError):
        decode_tree({"$": "tuple", "v": [], "of": DIFFERS}, leaf)


def test_equal_trees_are_not_opened_and_of_others_only_what_differs() -> None:
    tree = {
        "model": {f"w{i}": {"$": "x", "v": i} for i in range(50)},
        "rng": {"seed": 0, "more": list(range(50))},
        "loader": [0] * 50,
    }
    opened: list[bytes] = []

    def counting(data: bytes) -> Any:
        opened.append(data)
        return _opened(data)

    _opened = common_tree._opened
    node = {"$": "dict", "v": [["model", [1] * 50], ["rng", {"$": "dict", "v": [["seed", 0], ["more", [2] * 50]]}]]}
    with mock.patch.object(common_tree, "_opened", counting):
        merge = Merge()
        for _ in range(100):
            merge.add(raw(node), {})
        assert opened == []
        for seed in range(100):
            node["v"][1][1]["v"][0][1] = seed  # type: ignore[index]
            merge.add(raw(node), {})
        assert not [data for data in opened if data.startswith(b"[")]  # neither list was looked into
        assert len(opened) <= 2 * 100 + 5
    assert msgspec.json.decode(merge.tree)["v"][1][1]["v"] == [["seed", DIFFERS], ["more", [2] * 50]]
    assert tree


def test_a_tree_nested_without_end_is_merged_no_deeper_than_trees_are() -> None:
    deep = "[" * 20_000 + "1" + "]" * 20_000
    other = deep.replace("1", "2")
    merge = Merge()
    for text in (deep, other, deep):
        merge.add(msgspec.Raw(text.encode()), {})
    assert len(bytes(merge.tree)) < 1000


@pytest.mark.parametrize("seed", range(5))
def test_aliases_of_all_ranks_are_united_and_conflicts_dropped(seed: int) -> None:
    ranks = [{"t": "a", "u": "a"}, {"t": "a", "u": "b", "w": "b"}, {"u": "a"}, {"v": "c", "x": "a"}]
    random.Random(seed).shuffle(ranks)
    merge = Merge()
    for aliases in ranks:
        merge.add(raw({}), aliases)
    found = merge.aliases({"a": 1, "b": 1, "c": 1, "x": 1})  # on some rank, x is a tensor
    assert list(found.items()) == [("t", "a"), ("v", "c"), ("w", "b")]
