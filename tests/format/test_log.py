"""Segments of the training log: one spelling, and any damage is noticed."""

from __future__ import annotations

import json
import math
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CkptdError, FormatError, IntegrityError
from ckptd.format.digests import hex_digest
from ckptd.format.keys import LogKey
from ckptd.format.log import Segment, columns_of, decode_segment, encode_segment, figure, number
from ckptd.format.records import Parent
from ckptd.limits import LOG_COLUMNS_MAX, LOG_SEGMENT_BYTES_MAX, LOG_SEGMENT_ROWS_MAX

LIFE = "0123456789abcdef" * 2


def segment(rows: list[dict[str, float]], **other: object) -> Segment:
    found = Segment(
        columns=columns_of(rows),
        first=5,
        generation=2,
        life=LIFE,
        parent=Parent(generation=1, step=100),
        rank=0,
        run="testrun",
        step_seconds=tuple(None if at == 0 else 0.25 for at in range(len(rows))),
        steps=tuple(range(101, 101 + len(rows))),
        unix_seconds=tuple(1.8e9 + at for at in range(len(rows))),
    )
    return msgspec.structs.replace(found, **other)


ROWS = [{"loss": 2.5, "tokens": 4096.0}, {"loss": math.nan}, {"loss": -math.inf, "grad norm/ü": 1e-300}]


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(max_size=20), st.floats(), max_size=5), min_size=1, max_size=6))
def test_figures_come_out_as_they_went_in(rows: list[dict[str, float]]) -> None:
    data = encode_segment(segment(rows))
    found = decode_segment(data)
    assert encode_segment(found) == data
    for name, column in found.columns.items():
        for row, value in zip(rows, column, strict=True):
            back = number(value)
            assert (back is None) == (name not in row)
            if back is not None and not math.isnan(back):
                assert struct.pack("d", back) == struct.pack("d", row[name])
            elif back is not None:
                assert math.isnan(row[name])


def test_it_is_plain_json() -> None:
    plain = json.loads(encode_segment(segment(ROWS)))
    assert list(plain) == ["format", "kind", "digest", "segment"]
    assert plain["segment"]["columns"] == {
        "grad norm/ü": [None, None, 1e-300],
        "loss": [2.5, "nan", "-inf"],
        "tokens": [4096.0, None, None],
    }
    assert plain["segment"]["step_seconds"] == [None, 0.25, 0.25]


@pytest.mark.parametrize("at", range(0, 700, 7))
def test_any_flipped_bit_is_noticed(at: int) -> None:
    data = bytearray(encode_segment(segment(ROWS)))
    data[at % len(data)] ^= 1 << at % 8
    with pytest.raises(CkptdError):
        decode_segment(bytes(data))


def resealed(change: dict[str, object]) -> bytes:
    """A segment with other members, and a digest that fits."""
    inside = msgspec.to_builtins(segment(ROWS)) | change
    data = msgspec.json.encode({name: value for name, value in inside.items() if value != "gone"})
    return msgspec.json.encode({"format": 1, "kind": "log", "digest": hex_digest(data), "segment": msgspec.Raw(data)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [1, 2]}, "has 3"),
        ({"unix_seconds": [1.0]}, "unix_seconds"),
        ({"step_seconds": [1.0, 2.0, "much"]}, "step_seconds"),
        ({"columns": {"loss": [1.0]}}, "'loss'"),
        ({"columns": {f"c{number}": [1.0] * 3 for number in range(LOG_COLUMNS_MAX + 1)}}, "columns"),
        ({"first": 0}, "first"),
        ({"rank": -1}, "rank"),
        ({"life": "x"}, "life"),
        ({"parent": "gone"}, "parent"),
    ],
)
def test_what_the_format_does_not_allow_is_refused(change: dict[str, object], said: str) -> None:
    assert decode_segment(resealed({"unknown": 1})).first == 5
    with pytest.raises(FormatError, match=said):
        decode_segment(resealed(change))


def test_a_member_twice_is_refused() -> None:
    data = msgspec.json.encode(segment(ROWS)).replace(b'"first":5', b'"first":5,"first":5')
    sealed = msgspec.json.encode({"format": 1, "kind": "log", "digest": hex_digest(data), "segment": msgspec.Raw(data)})
    with pytest.raises(FormatError, match="twice"):
        decode_segment(sealed)


def test_another_digest_is_damage() -> None:
    data = encode_segment(segment(ROWS))
    with pytest.raises(IntegrityError, match="digest"):
        decode_segment(data.replace(b"4096.0", b"4097.0"))


def test_the_largest_segment_is_within_its_limit() -> None:
    row = {f"{number:02d}" + "x" * 61: -math.pi * 1e-300 for number in range(LOG_COLUMNS_MAX)}
    rows = [row] * LOG_SEGMENT_ROWS_MAX
    count = len(rows)
    data = encode_segment(
        segment(
            rows,
            steps=(10**12 - 1,) * count,
            unix_seconds=(math.pi * 1e9,) * count,
            step_seconds=(figure(math.pi * 1e-9),) * count,
        )
    )
    assert len(data) < LOG_SEGMENT_BYTES_MAX / 2
    assert len(decode_segment(data).steps) == count


def test_keys() -> None:
    key = segment(ROWS).key
    assert str(key) == f"log/000002/rank-00000-{LIFE}-000000000005-000000000007.json"
    assert LogKey.parse(str(key)) == key
    for wrong in ("log/2/rank-0.json", f"{key}x", str(key).replace("log", "lag"), str(key).replace("a", "A")):
        with pytest.raises(FormatError):
            LogKey.parse(wrong)
