"""Names of tensors: no two paths share one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ckptd.format.names import element, join, piece_name, segment

scalars = (
    st.text("ab~/,;e0:pltu\ud800\udfff", max_size=6)
    | st.text(max_size=5)
    | st.sampled_from(["__metadata__", "~m", "~e", "~0", "~i1", "~l0", "~t;", "", "None", "True", "1", "0x1.0p+0"])
    | st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | st.binary(max_size=4)
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def typed(key: Any) -> Any:
    """A key with its types, since True == 1 == 1.0 and 0.0 == -0.0."""
    if isinstance(key, tuple):
        return ("tuple", *map(typed, key))
    return (type(key), key.hex() if isinstance(key, float) else key)


@given(keys, keys)
@example((("a", "b"),), (("a,b",),))
@example((("a",), "b"), (("a", "b"),))
@example(("a;",), ("a", ";"))
@example(((),), ("",))
@example("", "~e")
@example("__metadata__", "~m")
@example(0.0, -0.0)
def test_r15_segments_are_injective(left: Any, right: Any) -> None:
    assume(typed(left) != typed(right))
    assert segment(left) != segment(right)


@given(st.lists(keys, min_size=1, max_size=3), st.lists(keys, min_size=1, max_size=3), st.integers(0, 99))
@example(["a/b"], ["a", "b"], 0)
@example(["a", "~l0"], ["a"], 0)
@example(["a~p0"], ["a"], 0)
def test_r15_whole_names_are_injective(left: list[Any], right: list[Any], number: int) -> None:
    names = {join(map(segment, path)) for path in (left, right)}
    assert len(names) == (1 if typed(tuple(left)) == typed(tuple(right)) else 2)
    assert join([*map(segment, left), element(number)]) not in names
    assert piece_name(join(map(segment, left)), number, 2) not in names


@given(keys)
def test_a_segment_is_writable_and_never_empty(key: Any) -> None:
    found = segment(key)
    assert found
    assert "/" not in found
    assert found != "__metadata__"
    found.encode()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("mlp/~/linear_0", "mlp~1~0~1linear_0"),
        ("../x", "..~1x"),
        ("/abs", "~1abs"),
        ("con", "con"),
        ("", "~e"),
        (" ", " "),
        ("a\\b", "a\\b"),
        ("a.b", "a.b"),
        ("\N{SNOWMAN}", "\N{SNOWMAN}"),
        ("\u00e9", "\u00e9"),
        ("e\u0301", "e\u0301"),  # the same to the eye, and another key
        ("\ud83d", "~ud83d;"),
        ("__metadata__", "~m"),
        (25, "~i25"),
        ("25", "25"),
        (-3, "~i-3"),
        (True, "~b1"),
        (1, "~i1"),
        (1.0, "~f0x1.0000000000000p+0"),
        (None, "~n"),
        (b"\x00\xff", "~x00ff"),
        ((), "~t;"),
        (("a", 1, ("b",)), "~ta,~i1,~tb;;"),
        (("a,b;",), "~ta~cb~s;"),
    ],
)
def test_r17_names_are_as_specified(key: Any, name: str) -> None:
    assert segment(key) == name


@pytest.mark.parametrize("key", [frozenset({"a"}), 1j, bytearray(b"a"), object(), range(3), ["a"], ("a", frozenset())])
def test_other_keys_have_no_name(key: Any) -> None:
    with pytest.raises(TypeError):
        segment(key)


def test_pieces_are_numbered_where_there_are_several() -> None:
    assert piece_name("a/b", 0, 1) == "a/b"
    assert [piece_name("a/b", number, 2) for number in (0, 1)] == ["a/b~p0", "a/b~p1"]
