"""The proof that a commit is: what every rank saw is there once, and equal receipts make equal bytes."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CkptdError, CoverageError, FormatError
from ckptd.format import index, proof
from ckptd.format.derived import DerivedKept
from ckptd.format.digests import hex_digest
from ckptd.format.keys import Version
from ckptd.format.proof import Commit, prove
from ckptd.format.records import Box, Grid, Index, Parent, RankRun, Skipped, Span, decode, encode
from tests.format.saved import Held, Rank, changed, whole, zeros


def ranks(world: int) -> list[Rank]:
    """A world in which each holds some rows of one tensor, rank 0 a replica for all, and each a value of its own."""
    rows = 2 * world + 1
    saved = []
    for rank in range(world):
        first, last = 2 * rank, rows if rank == world - 1 else 2 * rank + 2
        saved.append(
            Rank(
                [
                    Held("w", "float32", (rows, 3), [zeros(Box((first, 0), (last - first, 3)), "float32", (rows, 3))]),
                    Held("b", "int16", (4,), [zeros(None, "int16", (4,))] if rank == 0 else []),
                    whole("rng", "uint8", (3 + rank,), per_rank=True, seed=rank),
                ],
                rank=rank,
                world=world,
                parts=("model", f"only{rank}"),
                metrics={"loss": 0.5 + rank, "acc": 1.0},
            )
        )
    return saved


def receipts(world: int) -> list[bytes]:
    return [rank.receipt() for rank in ranks(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_every_rank_saw_is_in_the_manifest(world: int) -> None:
    given_receipts = receipts(world)
    commit = prove(given_receipts)
    manifest = commit.manifest
    assert list(commit.objects) == (["checkpoints/000000000100-g000001/common.json"] if world > 1 else [])
    entries = {entry.name: entry for entry in manifest.index or ()}
    # What only one rank has seen as its own is the world's.
    assert list(entries) == (["b", "w"] if world > 1 else ["b", "rng", "w"])
    b = entries["b"]
    assert b.grid == Grid(chunks=(4,), ranks=RankRun(0, 1, 1))
    w = prove(given_receipts, early=True).manifest.index[-1]  # type: ignore[index]
    assert [piece.rank for piece in w.pieces] == list(range(world))
    assert manifest.version == Version(100, 1)
    assert manifest.parts == ("model", *sorted(f"only{rank}" for rank in range(world)))
    assert manifest.metrics == {"loss": 0.5, "acc": 1.0}
    assert [(ref.rank, ref.bytes, ref.digest) for ref in manifest.receipts] == [
        (rank, len(data), hex_digest(data)) for rank, data in enumerate(given_receipts)
    ]
    assert manifest.bytes == sum(len(rank.stored()[1]) for rank in ranks(world))


def shuffled(data: bytes, seed: int) -> bytes:
    """The same record with the members of the metrics in another order."""
    record = json.loads(data)
    found = list(record["snapshot"]["metrics"].items())
    random.Random(seed).shuffle(found)
    record["snapshot"]["metrics"] = dict(found)
    return msgspec.json.encode(record)


def test_equal_receipts_make_equal_bytes() -> None:
    manifest = prove(receipts(3)).manifest
    assert encode(manifest) == encode(prove(receipts(3)).manifest)
    # An order of metrics in the receipts changes their digests, and nothing else.
    other = prove([shuffled(data, 4) for data in receipts(3)]).manifest
    assert encode(msgspec.structs.replace(other, receipts=manifest.receipts)) == encode(manifest)


def test_the_order_of_tensors_on_a_rank_does_not_show_in_the_index() -> None:
    there = Rank([whole("a", "uint8", (1,)), whole("b", "uint8", (2,)), whole("~i1", "int8", (2,))])
    back = replace(there, tensors=there.tensors[::-1])
    names = [[entry.name for entry in prove([rank.receipt()]).manifest.index or ()] for rank in (there, back)]
    assert names == [["a", "b", "~i1"]] * 2


def refused(given_receipts: list[bytes], message: str, kind: type[CkptdError] = CoverageError) -> None:
    with pytest.raises(kind, match=message):
        prove(given_receipts)


def test_r66_no_manifest_without_every_ranks_receipt() -> None:
    found = receipts(3)
    refused([], "no receipts")
    refused(found[:2], "2 receipts for a world of 3")
    refused(found[1:], "2 receipts for a world of 3")
    refused([*found, found[2]], "4 receipts for a world of 3")
    refused([found[0], found[2], found[1]], "receipt of rank 1 says that it is of rank 2")
    refused([found[0], found[1], found[1]], "receipt of rank 2 says that it is of rank 1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "other"),
        ("step", 101),
        ("generation", 2),
        ("launch", "launch#1"),
        ("parent", Version(50, 1)),
        ("world", 4),
    ],
)
def test_r124_r125_ranks_that_do_not_belong_together_are_refused(field: str, value: object) -> None:
    saved = ranks(3)
    saved[1] = replace(saved[1], **{field: value})
    refused([rank.receipt() for rank in saved], f"ranks 0 and 1 disagree on {field}")


def test_the_parent_is_carried_over() -> None:
    saved = [replace(rank, parent=Version(50, 1), generation=2) for rank in ranks(2)]
    assert prove([rank.receipt() for rank in saved]).manifest.parent == Parent(generation=1, step=50)


def one(*tensors: Held, **fields: object) -> Rank:
    return Rank(tensors, **fields)


def pair(left: list[Held], right: list[Held]) -> list[bytes]:
    return [Rank(tensors, rank=rank, world=2).receipt() for rank, tensors in enumerate((left, right))]


def seen(name: str = "w", dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> Held:
    """A tensor that a rank has seen and does not own."""
    return Held(name, dtype, shape)


def test_r11_what_a_rank_saw_must_be_held_by_some_rank() -> None:
    full = whole("w", "float32", (4,))
    prove(pair([seen()], [full]))
    refused(pair([seen()], [seen()]), "w: 0 of 4 elements are covered, by ranks none")
    prove(pair([], [full]))  # a rank may know less than others, as in a pipeline
    refused(pair([full, seen("x")], []), "x: 0 of 4 elements")


def test_gaps_and_overlaps_between_ranks_are_refused() -> None:
    def part(start: int, stop: int) -> list[Held]:
        return [Held("w", "float32", (4,), [zeros(Span(start, stop), "float32", (4,))])]

    prove(pair(part(0, 2), part(2, 4)))
    refused(pair(part(0, 2), part(3, 4)), r"w: 3 of 4 elements are covered, by ranks \[0, 1\]")
    refused(pair(part(0, 3), part(2, 4)), "w: ranks 0 and 1 both hold")


def test_ranks_that_see_a_tensor_differently_are_refused() -> None:
    full = whole("w", "float32", (4,))
    refused(pair([full], [seen(shape=(2, 2))]), r"w: rank 0 has float32\[4\], rank 1 has float32\[2, 2\]")
    refused(pair([full], [seen(dtype="int32")]), r"w: rank 0 has float32\[4\], rank 1 has int32\[4\]")
    own = whole("w", "float32", (4,), per_rank=True)
    refused(pair([full], [own]), r"w: rank 0 has float32\[4\], rank 1 has a value of its own")


def test_r12_a_value_of_a_ranks_own_is_whole_on_that_rank() -> None:
    commit = prove(pair([whole("r", "uint8", (3,), per_rank=True)], [whole("r", "int64", (2, 2), per_rank=True)]))
    assert commit.manifest.index == ()
    half = Held("r", "uint8", (4,), [zeros(Span(0, 2), "uint8", (4,))], per_rank=True)
    other_half = Held("r", "uint8", (4,), [zeros(Span(2, 4), "uint8", (4,))], per_rank=True)
    refused(pair([half], [other_half]), r"r: 2 of 4 elements are covered, by ranks \[0\]")
    refused(pair([whole("r", "uint8", (4,), per_rank=True)], [replace(half, pieces=())]), "r: 0 of 4 elements")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("shard/bytes", 4104, "rank 0: the receipt's size or digests do not fit"),
        ("shard/blocks", "", "rank 0: the receipt's size or digests do not fit"),
        ("shard/blocks", base64.b64encode(bytes(32)).decode(), "rank 0: the receipt's digests do not add up"),
        ("shard/digest", "0" * 32, "rank 0: the receipt's digests do not add up"),
        ("shard/key", "checkpoints/elsewhere.safetensors", "rank 0: the receipt's shard lies at checkpoints/elsewhere"),
        ("shard/attempt", "a2", "rank 0: the receipt's shard lies at"),
        ("snapshot/layout/shard_bytes", 4120, "rank 0: shard of 4120 bytes is described up to byte 4112"),
        ("snapshot/layout/tensors/0/pieces/0/bytes", 12, "rank 0: w: a piece of 12 bytes where its shape"),
        ("snapshot/layout/tensors/0/shape", [5], "rank 0: w: a piece of 16 bytes where its shape"),
        ("snapshot/layout/tensors/0/dtype", "float31", "rank 0: w: unknown dtype"),
    ],
)
def test_r63_a_receipt_that_does_not_hold_is_refused(path: str, value: object, message: str) -> None:
    receipt = Rank([whole("w", "float32", (4,))]).receipt()
    prove([receipt])
    refused([changed(receipt, path, value)], message)


def test_what_is_no_receipt_is_a_format_error() -> None:
    receipt = Rank().receipt()
    refused([b"x"], "not a record", FormatError)
    skipped = Skipped(generation=1, rank=0, reason="no free slot", run="r", step=100)
    refused([encode(skipped)], "expected a receipt, found a 'skipped'", FormatError)
    refused([changed(receipt, "snapshot", {})], "not a record", FormatError)
    refused([changed(receipt, "snapshot/layout", [])], "malformed layout", FormatError)


def test_an_empty_state_commits() -> None:
    manifest = prove([Rank().receipt()]).manifest
    assert (manifest.index, manifest.bytes) == ((), 4096)


def read_index(commit: Commit) -> list[str]:
    """Names in an index that lies in parts, which are checked against what the manifest says of them."""
    found: list[str] = []
    assert list(commit.objects) == [ref.key for ref in commit.manifest.index_parts]
    for ref in commit.manifest.index_parts:
        data = commit.objects[ref.key]
        assert (ref.bytes, ref.digest) == (len(data), hex_digest(data))
        own = [entry.name for entry in decode(data, Index).tensors]
        assert (ref.first, ref.last) == (own[0], own[-1])
        found += own
    return found


@pytest.mark.parametrize("target", [1, 300, 1000, 10**6])
def test_a_large_index_lies_in_parts_of_sorted_names(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", 500)
    monkeypatch.setattr(index, "INDEX_PART_BYTES_TARGET", target)
    tensors = [whole(f"w{number * 7 % 40}", "uint8", (1,)) for number in range(40)]
    commit = prove([Rank(tensors).receipt()])
    assert commit.manifest.index is None
    assert read_index(commit) == sorted(held.name for held in tensors)
    parts = list(commit.objects)
    assert parts[0] == "checkpoints/000000000100-g000001/index-00000.json"
    assert len(parts) == {1: 40, 10**6: 1}.get(target, len(parts))
    if target in (300, 1000):
        assert all(len(data) < target + 100 for data in commit.objects.values())
        assert 1 < len(parts) < 40


def test_the_index_lies_inside_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_derived", DerivedKept(budget_bytes=0))  # limits do not change but here
    receipt = Rank([whole("a", "uint8", (1,)), whole("b", "uint8", (1,))]).receipt()
    size = sum(len(encode(entry)) for entry in prove([receipt]).manifest.index or ())
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", size)
    assert prove([receipt]).manifest.index is not None
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", size - 1)
    assert read_index(prove([receipt])) == ["a", "b"]


def test_the_real_limits_hold_for_many_tensors() -> None:
    tensors = [Held(f"model/layers.{number}.weight", "uint8", (1,), [(None, b"x")]) for number in range(3000)]
    commit = prove([Rank(tensors).receipt()])
    assert commit.manifest.index is None
    assert len(read_index(commit)) == 3000
    assert len(encode(commit.manifest)) < 2000


@settings(max_examples=30)
@given(st.data())
def test_a_damaged_receipt_is_never_a_surprise(data: st.DataObject) -> None:
    found = receipts(2)
    number = data.draw(st.integers(0, 1))
    raw = bytearray(found[number])
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found[number] = bytes(raw)
    try:
        manifest = prove(found).manifest
    except (FormatError, CoverageError):
        return
    # What nothing contradicts, such as another metric, is what the manifest then vouches for by digest.
    assert manifest.receipts[number].digest == hex_digest(found[number])
