"""Names in storage: they parse back, sort as numbers do, and hold nothing that a user wrote."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import FormatError
from ckptd.format import keys
from ckptd.format.keys import GENERATION_MAX, KEY_PATTERN, RANK_MAX, STEP_MAX, Version, parse_version

versions = st.builds(Version, st.integers(0, STEP_MAX), st.integers(0, GENERATION_MAX))
tokens = st.text("AZaz09._=-", min_size=1, max_size=128)


@given(versions)
def test_versions_parse_back(version: Version) -> None:
    assert parse_version(str(version)) == version


@given(versions, versions)
def test_versions_sort_as_their_names(left: Version, right: Version) -> None:
    assert (left < right) == (str(left) < str(right))


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{11,13}-?g[0-9]{5,7}"))
def test_any_text_parses_or_raises_format_error(text: str) -> None:
    with contextlib.suppress(FormatError):
        assert str(parse_version(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1-g1",
        "000000000001-g000001\n",
        " 000000000001-g000001",
        "\N{ARABIC-INDIC DIGIT ONE}" * 12 + "-g000001",
        "0" * 12 + "-g1" + "0" * 6,
    ],
)
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="not a checkpoint name"):
        parse_version(text)


@given(versions, st.integers(0, RANK_MAX), st.integers(1, RANK_MAX + 1), tokens)
def test_r17_keys_are_made_of_numbers_and_tokens(version: Version, rank: int, world: int, token: str) -> None:
    made = [
        keys.RUN,
        keys.generation_key(version.generation),
        keys.manifest_key(version),
        keys.shard_key(version, rank, world, token),
        keys.receipt_key(version, rank, world),
        keys.index_key(version, rank),
        keys.mark_key(version, "pinned", token),
        keys.tombstone_key(version),
    ]
    assert all(KEY_PATTERN.fullmatch(key) for key in made)
    assert len(set(made)) == len(made)
    assert not [(a, b) for a in made for b in made if b.startswith(f"{a}/")]


@pytest.mark.parametrize("key", ["", "/", "a/", "/a", "a//b", ".", "..", "a/..", "../a", "a\n", "a b", "ä", "x" * 201])
def test_what_is_no_key_does_not_match(key: str) -> None:
    assert KEY_PATTERN.fullmatch(key) is None


@pytest.mark.parametrize("key", ["...", "a..", ".a", "a/.b", "x" * 200, "/".join("abcdefgh")])
def test_odd_keys_match(key: str) -> None:
    assert KEY_PATTERN.fullmatch(key)


def test_prefixes_end_in_a_slash_and_hold_their_keys() -> None:
    version = Version(1000, 3)
    for prefix, key in (
        (keys.GENERATIONS, keys.generation_key(3)),
        (keys.MANIFESTS, keys.manifest_key(version)),
        (keys.CHECKPOINTS, keys.shard_key(version, 0, 1, "a")),
        (keys.checkpoint_prefix(version), keys.receipt_key(version, 0, 1)),
        (keys.MARKS, keys.mark_key(version, "pinned", "a")),
        (keys.TOMBSTONES, keys.tombstone_key(version)),
    ):
        assert re.fullmatch(r"([A-Za-z0-9._=-]+/)+", prefix)
        assert key.startswith(prefix)
