"""The state tree: what goes in comes out, by type and by bit; what cannot be kept is named before a byte is written."""

from __future__ import annotations

import contextlib
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptd.errors import FormatError, StateError
from ckptd.format.tree import decode_json, decode_tree, encode_tree
from ckptd.limits import NAME_BYTES_MAX, TREE_DEPTH_MAX


class Handle:
    """A value that the tree keeps only where somebody has a codec for it."""

    def __init__(self, name: str) -> None:
        self.name = name


def encode_leaf(value: object, path: tuple[str, ...]) -> dict[str, Any] | None:
    return {"$": "handle", "name": value.name} if isinstance(value, Handle) else None


def decode_leaf(tag: str, members: dict[str, Any]) -> object:
    if tag != "handle":
        raise FormatError(f"unknown type {tag}")
    return Handle(members["name"])


def written(value: object) -> bytes:
    return msgspec.json.encode(encode_tree(value, encode_leaf))


def read(data: bytes) -> Any:
    return decode_tree(decode_json(data), decode_leaf)


def exact(value: Any) -> Any:
    """A form in which values compare equal only if they are the same in type, order and every bit."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, complex):
        return kind, exact(value.real), exact(value.imag)
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(exact, value)))
    if isinstance(value, dict):
        return kind, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [exact(item) for item in value]
    return kind, value


floats = st.floats() | st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
integers = (
    st.integers()
    | st.integers(-70, 70).map(lambda power: 2 ** abs(power) * (1 if power > 0 else -1))
    | st.integers(2**4000, 2**4000 + 10)
)
strings = st.text() | st.text('a\ud800\udfff\0"\\', max_size=5)
plain = st.none() | st.booleans() | integers | floats | strings | st.binary(max_size=8)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | strings | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)
values = st.recursive(
    plain | st.binary(max_size=8).map(bytearray) | st.complex_numbers() | st.complex_numbers(allow_nan=False),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
        st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 9)),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
    ),
    max_leaves=12,
)


@given(values)
@example({25: 1, "25": 2, None: 3, (1, "a"): 4, b"x": 5, -0.0: 6, True: 7})
@example([2**53, 2**53 + 1, -(2**53) - 1, 10**5000, 0, -1])
@example([-0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 1.7976931348623157e308, 1e16, 0.1])
@example([complex(-0.0, math.nan), "\ud800", "\0", "", b"", (), [], {}, set(), deque(maxlen=0)])
def test_r14_values_come_back_exact_and_saving_again_gives_the_same_bytes(value: Any) -> None:
    data = written(value)
    back = read(data)
    assert exact(back) == exact(value)
    if not _has_sets(value):  # their order is that of their elements' spelling, the same within a type
        assert written(back) == data


def _has_sets(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_sets, value.values()))
    return isinstance(value, set | frozenset) or (
        isinstance(value, list | tuple | deque) and any(map(_has_sets, value))
    )


def test_r13_r14_r21_a_schedulers_state_is_a_fixed_point() -> None:
    state = {
        "milestones": Counter({25: 1, 50: 2}),
        "log": [{"a": 1}, {"b": 2}],
        "seen": 2**40,
        "tokens": 10**30,
        "keys": {1: "x", "1": "y", None: 0, (1, 2): "t", 0.5: "f"},
    }
    data = written(state)
    assert exact(read(data)) == exact(state)
    assert written(read(data)) == data


def test_a_defaultdict_comes_back_as_a_dict() -> None:
    value: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    assert exact(read(written(value))) == exact({"a": [1]})


def test_values_with_a_codec_are_kept() -> None:
    assert read(written([Handle("a")]))[0].name == "a"


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": lambda: 0}]}, "a/~l1/b"),
        ({"a": {1: object()}}, "a/~i1"),
        ([Colour.RED], "~l0"),
        ({"x/y": Text("a")}, "x~1y"),
        (object(), "the state"),
        ({"a": {Colour.RED: 1}}, "a/~i1"),
        ({"a": {Text("k"): 1}}, "a/k"),
        ({"a": {object(): 1}}, "a: a dict key of type object"),
        ({"a": {frozenset({1}): 1}}, "a: a dict key of type frozenset"),
        ({"a": {1j: 1}}, "a: a dict key of type complex"),
        ({"a": {10**5000: 1}}, "a: a dict key of type int"),
        ({"a": {"k" * (NAME_BYTES_MAX + 1): 1}}, "a: a dict key is longer"),
        ({"a": {math.nan: 1, float("nan"): 2}}, "a: two dict keys cannot be told apart: nan"),
        ({"a": {1, ("x", object())}}, "a/~l"),
    ],
)
def test_r22_what_cannot_be_kept_is_named(value: object, path: str) -> None:
    with pytest.raises(StateError) as caught:
        written(value)
    assert str(caught.value).startswith(path)


def test_r22_a_cycle_is_an_error_with_a_path() -> None:
    cycle: list[Any] = []
    cycle.append({"a": cycle})
    with pytest.raises(StateError, match="nested deeper than") as caught:
        written(cycle)
    assert str(caught.value).startswith("~l0/a/~l0/a…")


def test_nesting_is_kept_up_to_its_limit() -> None:
    value: Any = 0
    for _ in range(TREE_DEPTH_MAX):
        value = [value]
    assert read(written(value)) == value
    with pytest.raises(StateError):
        written([value])
    with pytest.raises(FormatError, match="nested deeper"):
        read(b"[" + written(value) + b"]")


def test_a_key_as_deep_as_recursion_goes_is_an_error_too() -> None:
    key: tuple[Any, ...] = ()
    for _ in range(5000):
        key = (key,)
    with pytest.raises(StateError, match="dict key"):
        written({key: 1})


MALFORMED = [
    b"",
    b"\xff",
    b'{"$":"tuple","v":[],"v":[]}',
    b'{"$":"tuple","$":"set","v":[]}',
    b"{}",
    b'{"v":[]}',
    b'{"$":1}',
    b'{"$":"unknown"}',
    b'{"$":"handle"}',
    b"9007199254740993",
    b"1" * 5000,
    b"[" * 100_000,
    b'{"$":"tuple","v":[' * 200 + b"]}" * 200,
    b'{"$":"int"}',
    b'{"$":"int","v":"0x5"}',
    b'{"$":"int","v":"0x20_0000_0000_0001"}',
    b'{"$":"int","v":"0X20000000000001"}',
    b'{"$":"int","v":5}',
    b'{"$":"float","v":"nan"}',
    b'{"$":"float","v":"3ff0000000000000"}',
    b'{"$":"float","v":"7FF0000000000000"}',
    b'{"$":"float","v":"7ff0"}',
    b'{"$":"float","v":null}',
    b'{"$":"complex","v":[]}',
    b'{"$":"complex","v":["3ff0000000000000"]}',
    b'{"$":"complex","v":"ab"}',
    b'{"$":"bytes","v":"A"}',
    b'{"$":"bytes","v":"QR=="}',
    b'{"$":"bytes","v":" QQ=="}',
    b'{"$":"bytes","v":"\\u00e9"}',
    b'{"$":"bytes","v":["QQ=="]}',
    b'{"$":"str","v":"YQ=="}',
    b'{"$":"str","v":"/w=="}',
    b'{"$":"tuple","v":"abc"}',
    b'{"$":"tuple","v":null}',
    b'{"$":"tuple","v":[],"more":1}',
    b'{"$":"set","v":[[]]}',
    b'{"$":"set","v":[1,1]}',
    b'{"$":"frozenset","v":[1,true]}',
    b'{"$":"deque","v":[1,2],"maxlen":1}',
    b'{"$":"deque","v":[],"maxlen":null}',
    b'{"$":"deque","v":[],"maxlen":-1}',
    b'{"$":"deque","v":[],"maxlen":true}',
    b'{"$":"deque","v":[],"maxlen":99999999999999999999}',
    b'{"$":"dict","v":["ab"]}',
    b'{"$":"dict","v":{"a":1}}',
    b'{"$":"dict","v":[["a"]]}',
    b'{"$":"dict","v":[["a",1,2]]}',
    b'{"$":"dict","v":[["a",1],["a",2]]}',
    b'{"$":"dict","v":[[1,1],[true,2]]}',
    b'{"$":"dict","v":[[{"$":"float","v":"7ff8000000000000"},1],[{"$":"float","v":"7ff8000000000000"},1]]}',
    b'{"$":"dict","v":[[[],1]]}',
    b'{"$":"dict","v":[[{"$":"frozenset","v":[]},1]]}',
    b'{"$":"dict","v":[[{"$":"handle","name":"a"},1]]}',
    b'{"$":"counter","v":[1]}',
]


@pytest.mark.parametrize("data", MALFORMED)
def test_what_could_not_have_been_written_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read(data)


@given(st.binary(max_size=60))
def test_any_bytes_raise_only_format_error(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        read(data)


TAGS = ["int", "float", "complex", "str", "bytes", "bytearray", "tuple", "set", "frozenset", "deque", "dict", "odict"]
nodes = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.fixed_dictionaries(
            {"$": st.sampled_from([*TAGS, "counter", "handle"])}, optional={"v": inner, "maxlen": inner}
        ),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=10,
)


@given(nodes)
def test_any_json_is_refused_or_means_one_value(node: Any) -> None:
    try:
        value = decode_tree(node, decode_leaf)
    except FormatError:
        return
    assert exact(decode_tree(encode_tree(value, encode_leaf), decode_leaf)) == exact(value)


def test_a_leaf_that_nests_without_end_is_an_error() -> None:
    node: dict[str, Any] = {"$": "box", "in": 0}
    for _ in range(100_000):
        node = {"$": "box", "in": node}

    def unpack(tag: str, members: dict[str, Any]) -> object:
        return decode_tree(members["in"], unpack)

    try:
        with pytest.raises(FormatError, match="recursion"):
            decode_tree(node, unpack)
    finally:
        while node:  # taking it apart at once would overflow the stack
            node = node.pop("in") or {}
