"""What is kept of a layout makes a proof faster, and never another one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckptd.errors import CoverageError
from ckptd.format import proof
from ckptd.format.derived import Derived, DerivedKept
from ckptd.format.index import SplitIndex
from ckptd.format.proof import Commit, prove
from ckptd.format.records import Layout, Receipt, Reference, decode, decode_layout, encode
from tests.format.saved import Rank, whole

MANY = [whole(f"layer.{number}.weight", "float32", (3, number)) for number in range(1, 40)]


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_derived", DerivedKept())


def told(commit: Commit) -> Any:
    return encode(commit.manifest), commit.objects, commit.pinned


def test_the_next_save_is_proved_as_if_it_were_the_first(
    monkeypatch: pytest.MonkeyPatch, nothing_is_known: DerivedKept
) -> None:
    first = Rank(MANY, step=1, aliases={"tied": "layer.1.weight"})
    second = Rank(MANY, step=2, aliases={"tied": "layer.1.weight"}, metrics={"loss": 1.0}, attempt="b")
    prove([first.receipt()])
    assert nothing_is_known.get(first.snapshot(first.held()[0]).layout, first.block_bytes) is not None
    decoded: list[msgspec.Raw] = []

    def decoding(raw: msgspec.Raw) -> Layout:
        decoded.append(raw)
        return decode_layout(raw)

    monkeypatch.setattr(proof, "decode_layout", decoding)
    known = prove([second.receipt()])
    assert decoded == []
    forgotten(monkeypatch)
    assert told(prove([second.receipt()])) == told(known)
    assert len(decoded) == 1


def test_a_large_index_comes_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.format.index.INDEX_INLINE_BYTES_MAX", 100)
    monkeypatch.setattr("ckptd.format.index.INDEX_PART_BYTES_TARGET", 1000)
    prove([Rank(MANY, step=1).receipt()])
    known = prove([Rank(MANY, step=2).receipt()])
    forgotten(monkeypatch)
    assert len(known.objects) > 1
    assert told(prove([Rank(MANY, step=2).receipt()])) == told(known)


def spoilt(receipt: bytes, **changes: Any) -> bytes:
    found = decode(receipt, Receipt)
    return encode(msgspec.structs.replace(found, shard=msgspec.structs.replace(found.shard, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": 4096},
        {"blocks": b"x" * 16},
        {"resident_blocks": b"x" * 16},
        {"digest": "0" * 32},
        {"key": "checkpoints/x.safetensors"},
        {"block_bytes": 65536, "bytes": 1},
        {"bytes": 1, "digest": "0" * 32, "key": "elsewhere"},
    ],
)
def test_a_receipt_that_does_not_fit_is_refused_with_the_same_words(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    good = Rank(MANY, step=2).receipt()
    with pytest.raises(CoverageError) as without:
        prove([spoilt(good, **changes)])
    forgotten(monkeypatch)
    prove([Rank(MANY, step=1).receipt()])
    with pytest.raises(CoverageError) as known:
        prove([spoilt(good, **changes)])
    assert str(known.value) == str(without.value)


def test_what_refers_elsewhere_is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prove([Rank(MANY, step=1).receipt()])
    nothing = (Reference(bytes=5, extents=(), key=decode(Rank(MANY, step=1).receipt(), Receipt).shard.key),)
    with pytest.raises(CoverageError) as known:
        prove([spoilt(Rank(MANY, step=2).receipt(), references=nothing)])
    forgotten(monkeypatch)
    with pytest.raises(CoverageError) as without:
        prove([spoilt(Rank(MANY, step=2).receipt(), references=nothing)])
    assert str(known.value) == str(without.value)


def test_several_ranks_are_proved_together(nothing_is_known: DerivedKept) -> None:
    ranks = [Rank([whole(f"w{rank}", "float32", (4,))], rank=rank, world=2) for rank in range(2)]
    prove([rank.receipt() for rank in ranks])
    assert all(nothing_is_known.get(rank.snapshot(rank.held()[0]).layout, rank.block_bytes) is None for rank in ranks)


def test_a_layout_with_a_hole_is_never_kept(nothing_is_known: DerivedKept) -> None:
    layout, _ = Rank(MANY).held()
    bad = msgspec.structs.replace(layout, tensors=layout.tensors[1:])
    snapshot = msgspec.structs.replace(Rank(MANY).snapshot(layout), layout=msgspec.Raw(encode(bad)))
    receipt = msgspec.structs.replace(decode(Rank(MANY).receipt(), Receipt), snapshot=msgspec.Raw(encode(snapshot)))
    for _ in range(2):
        with pytest.raises(CoverageError, match="hole"):
            prove([encode(receipt)])
    assert nothing_is_known.get(snapshot.layout, Rank(MANY).block_bytes) is None


def test_no_more_is_kept_than_the_budget_allows() -> None:
    kept = DerivedKept(budget_bytes=100)
    derived = Derived({}, 0, 0, 0, SplitIndex((), (), ()))
    layouts = [msgspec.Raw(bytes([65 + number]) * 40) for number in range(3)]
    for layout in layouts[:2]:
        kept.keep(layout, 1, derived)
    assert kept.get(layouts[0], 1) is derived
    kept.keep(layouts[2], 1, derived)
    assert [kept.get(layout, 1) is not None for layout in layouts] == [True, False, True]
    assert kept.get(layouts[0], 2) is None
    kept.keep(msgspec.Raw(b"x" * 101), 1, derived)
    assert kept.get(msgspec.Raw(b"x" * 101), 1) is None
    assert kept.get(layouts[2], 1) is derived
