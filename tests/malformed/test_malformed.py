"""Every rule of the format has a file that breaks it and nothing else, and each is refused by exactly one class.

``v1/<what>/<rule>``: the folder says what is read. None is ever edited; a new rule gets a new file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.checkpoint.locating import sought
from ckptd.checkpoint.regions import region
from ckptd.errors import CkptdError, CoverageError, FormatError, UnsupportedFormat
from ckptd.format.proof import prove
from ckptd.format.records import GenerationRecord, Index, Lease, Manifest, Mark, Run, decode
from ckptd.format.shard import read_header
from ckptd.format.tree import decode_json, decode_tree

FOLDER = Path(__file__).parent / "v1"


def _unknown(tag: str, members: dict[str, object]) -> object:
    raise FormatError(f"no codec for {tag}")


def _located(data: bytes) -> object:
    """Every tensor of an index, in a world of four."""
    index = decode(data, Index)
    return [sought(entry, index.rank_lists, region(entry.shape), 4) for entry in index.tensors]


READERS: dict[str, Callable[[bytes], object]] = {
    "run": lambda data: decode(data, Run),
    "generation": lambda data: decode(data, GenerationRecord),
    "manifest": lambda data: decode(data, Manifest),
    "mark": lambda data: decode(data, Mark),
    "lease": lambda data: decode(data, Lease),
    "index": _located,
    "receipt": lambda data: prove([data]),
    "tree": lambda data: decode_tree(decode_json(data), _unknown),
    "shard": read_header,
}

REFUSED: dict[str, tuple[type[CkptdError], str]] = {
    "generation/generation-negative.json": (FormatError, "$.generation"),
    "generation/generation-too-large.json": (FormatError, "$.generation"),
    "generation/parent-step-too-large.json": (FormatError, "$.opened_from.step"),
    "generation/parent-without-a-step.json": (FormatError, "$.opened_from"),
    "generation/size-as-a-fraction.json": (FormatError, "$.pid"),
    "generation/size-over-63-bits.json": (FormatError, "$.pid"),
    "generation/text-too-long.json": (FormatError, "$.host"),
    "generation/world-of-nobody.json": (FormatError, "$.world"),
    "generation/world-too-large.json": (FormatError, "$.world"),
    "index/grid-beside-pieces.json": (CoverageError, "w: has a grid as well as pieces"),
    "index/grid-beyond-the-world.json": (CoverageError, "w: lies on rank 4 of 4"),
    "index/grid-of-countless-cells-on-a-list.json": (
        CoverageError,
        "w: a grid of 1329227995784915872903807060280344576 cells on 4 ranks",
    ),
    "index/grid-of-countless-cells.json": (CoverageError, "w: a grid of 1152921504606846976 cells on 4 ranks, 0:4:1"),
    "index/grid-of-other-dimensions.json": (CoverageError, "w: a grid of cells (5, 1) does not fit the shape (5,)"),
    "index/grid-on-a-list-that-is-not-there.json": (CoverageError, "w: a grid on a list of ranks that is not there"),
    "index/grid-run-beyond-its-last-rank.json": (CoverageError, "w: a grid of 2 cells on 2 ranks, 0:4:2"),
    "index/grid-run-without-a-step.json": (FormatError, "$.tensors[0].grid.ranks.step"),
    "index/grid-with-a-chunk-beyond-the-tensor.json": (
        CoverageError,
        "w: a grid of cells (6,) does not fit the shape (5,)",
    ),
    "index/grid-with-a-rank-too-few.json": (CoverageError, "w: a grid of 3 cells on 2 ranks, 0:2:1"),
    "index/grid-with-a-rank-too-many.json": (CoverageError, "w: a grid of 3 cells on 4 ranks"),
    "index/grid-with-an-empty-chunk.json": (CoverageError, "w: a grid of cells (0,) does not fit the shape (5,)"),
    "index/grid-without-ranks.json": (FormatError, "$.tensors[0].grid"),
    "index/pieces-twice.json": (CoverageError, "w: ranks 0 and 1 both hold elements of (3,)+(2,) and (0,)+(5,)"),
    "index/pieces-with-a-gap.json": (CoverageError, "w: 3 of 5 elements are covered, by ranks [0]"),
    "lease/lease-for-an-unknown-purpose.json": (FormatError, "$.purpose"),
    "manifest/digest-in-capitals.json": (FormatError, "$.receipts[0].digest"),
    "manifest/digest-too-short.json": (FormatError, "$.receipts[0].digest"),
    "manifest/metric-not-a-number.json": (FormatError, "not a record of the format"),
    "manifest/negative-dimension.json": (FormatError, "$.index[0].shape[0]"),
    "manifest/step-too-large.json": (FormatError, "$.step"),
    "manifest/too-many-dimensions.json": (FormatError, "$.index[0].shape"),
    "mark/mark-of-an-unknown-kind.json": (FormatError, "$.mark"),
    "mark/version-not-padded.json": (FormatError, "$.version"),
    "receipt/alias-of-nothing.json": (
        CoverageError,
        "rank 0: tied: an alias of x, which is not a tensor of this layout",
    ),
    "receipt/alias-that-is-a-tensor.json": (
        CoverageError,
        "rank 0: v: an alias of w, which is not a tensor of this layout",
    ),
    "receipt/attempt-with-a-slash.json": (FormatError, "$.shard.attempt"),
    "receipt/blocks-cut-otherwise.json": (CoverageError, "rank 0: the receipt's size or digests do not fit its layout"),
    "receipt/blocks-not-base64.json": (FormatError, "$.shard.blocks"),
    "receipt/blocks-of-no-whole-pages.json": (FormatError, "$.shard.block_bytes"),
    "receipt/blocks-too-long.json": (FormatError, "$.shard.block_bytes"),
    "receipt/blocks-too-short.json": (FormatError, "$.shard.block_bytes"),
    "receipt/digests-that-do-not-add-up.json": (CoverageError, "rank 0: the receipt's digests do not add up"),
    "receipt/element-missing.json": (CoverageError, "w: 3 of 4 elements are covered, by ranks [0]"),
    "receipt/element-twice.json": (CoverageError, "w: ranks 0 and 0 both hold elements of (2,)+(2,) and (0,)+(3,)"),
    "receipt/header-longer-than-described.json": (
        CoverageError,
        "rank 0: hole or overlap in the shard at byte 4095: the next piece starts at 4096",
    ),
    "receipt/hole-in-the-shard.json": (
        CoverageError,
        "rank 0: hole or overlap in the shard at byte 4096: the next piece starts at 4097",
    ),
    "receipt/later-version.json": (
        UnsupportedFormat,
        "written by a newer release: format version 3, and this one reads 2 (upgrade ckptd)",
    ),
    "receipt/layout-member-twice.json": (FormatError, "an object has the member 'shard_bytes' twice"),
    "receipt/layout-of-nothing.json": (FormatError, "malformed layout"),
    "receipt/name-twice.json": (CoverageError, "rank 0: w: named twice in one layout"),
    "receipt/overlap-in-the-shard.json": (
        CoverageError,
        "rank 0: hole or overlap in the shard at byte 4112: the next piece starts at 4111",
    ),
    "receipt/own-value-in-part.json": (CoverageError, "w: 3 of 4 elements are covered, by ranks [0]"),
    "receipt/piece-as-box-and-range.json": (CoverageError, "rank 0: w: a piece is a box or a range, not both"),
    "receipt/piece-of-other-bytes.json": (
        CoverageError,
        "rank 0: w: a piece of 12 bytes where its shape and dtype make 16",
    ),
    "receipt/piece-of-other-dimensions.json": (
        CoverageError,
        "rank 0: w: box (0, 0)+(2, 2) does not lie in shape (4,)",
    ),
    "receipt/piece-outside-its-tensor.json": (CoverageError, "rank 0: w: box (2,)+(4,) does not lie in shape (4,)"),
    "receipt/range-backwards.json": (CoverageError, "rank 0: w: range 4:0 does not lie in shape (4,)"),
    "receipt/range-outside-its-tensor.json": (CoverageError, "rank 0: w: range 1:5 does not lie in shape (4,)"),
    "receipt/rank-of-a-larger-world.json": (CoverageError, "1 receipts for a world of 2 ranks"),
    "receipt/rank-of-its-own.json": (CoverageError, "the receipt of rank 0 says that it is of rank 1"),
    "receipt/receipt-of-nothing.json": (FormatError, "not a record of the format"),
    "receipt/reference-beyond-its-shard.json": (
        CoverageError,
        "attempt-20.safetensors: 70002 bytes at 74113 of a shard of 74114",
    ),
    "receipt/reference-of-a-header-too-long.json": (
        CoverageError,
        "rank 0: a shard of 8208 bytes cannot hold what its references leave",
    ),
    "receipt/reference-of-no-pages.json": (
        CoverageError,
        "rank 0: a shard of 4113 bytes cannot hold what its references leave",
    ),
    "receipt/reference-to-a-part-of-a-piece.json": (
        CoverageError,
        "attempt-20.safetensors: bytes 4600 to 74600 are no whole pieces",
    ),
    "receipt/reference-to-itself.json": (
        CoverageError,
        "attempt-30.safetensors: a reference to nothing of another checkpoint",
    ),
    "receipt/reference-to-no-shard.json": (FormatError, "$.shard.references[0].key"),
    "receipt/reference-to-nothing.json": (
        CoverageError,
        "attempt-20.safetensors: a reference to nothing of another checkpoint",
    ),
    "receipt/reference-twice.json": (CoverageError, "rank 0: two references hold byte 74602"),
    "receipt/references-out-of-order.json": (CoverageError, "rank 0: references are not in order"),
    "receipt/resident-bytes-of-nothing.json": (
        CoverageError,
        "rank 0: resident pieces up to byte 8192 are described up to byte 0",
    ),
    "receipt/resident-digests-missing.json": (
        CoverageError,
        "rank 0: the receipt's size or digests do not fit its layout",
    ),
    "receipt/resident-digests-that-nobody-asked-for.json": (
        CoverageError,
        "rank 0: the receipt's size or digests do not fit its layout",
    ),
    "receipt/resident-hole.json": (
        CoverageError,
        "rank 0: hole or overlap in the slot behind the shard at byte 8200: the next piece starts at 8204",
    ),
    "receipt/resident-longer-than-described.json": (
        CoverageError,
        "rank 0: resident pieces up to byte 8220 are described up to byte 8216",
    ),
    "receipt/resident-not-on-the-page-behind-the-shard.json": (
        CoverageError,
        "rank 0: hole or overlap in the slot behind the shard at byte 8192: the next piece starts at 4104",
    ),
    "receipt/resident-of-its-own-value.json": (
        CoverageError,
        "rank 0: b: a value of its own has no copy of another rank's",
    ),
    "receipt/resident-outside-its-tensor.json": (CoverageError, "rank 0: b: range 5:7 does not lie in shape (6,)"),
    "receipt/scalar-twice.json": (CoverageError, "w: saved whole by ranks 0 and 0"),
    "receipt/shard-elsewhere.json": (
        CoverageError,
        "rank 0: the receipt's shard lies at checkpoints/x.safetensors, which is not its place",
    ),
    "receipt/shard-longer-than-described.json": (
        CoverageError,
        "rank 0: shard of 4115 bytes is described up to byte 4114",
    ),
    "receipt/shard-of-another-size.json": (
        CoverageError,
        "rank 0: the receipt's size or digests do not fit its layout",
    ),
    "receipt/tensor-that-nobody-saved.json": (CoverageError, "w: 0 of 4 elements are covered, by ranks none"),
    "receipt/too-few-digests.json": (CoverageError, "rank 0: the receipt's size or digests do not fit its layout"),
    "receipt/unknown-dtype.json": (CoverageError, "rank 0: w: unknown dtype 'float31'"),
    "run/a-pickle.json": (FormatError, "not a record of the format"),
    "run/another-kind.json": (FormatError, "expected a run, found a 'index'"),
    "run/earlier-than-the-first-version.json": (FormatError, "$.format"),
    "run/empty.json": (FormatError, "not a record of the format"),
    "run/integer-too-long.json": (FormatError, "not JSON"),
    "run/later-version.json": (
        UnsupportedFormat,
        "written by a newer release: format version 2, and this one reads 1 (upgrade ckptd)",
    ),
    "run/member-missing.json": (FormatError, "not a record of the format"),
    "run/member-twice-by-escape.json": (FormatError, "an object has the member 'run' twice"),
    "run/member-twice.json": (FormatError, "an object has the member 'run' twice"),
    "run/nested-too-deep.json": (FormatError, "not a record of the format"),
    "run/no-kind.json": (FormatError, "not a record of the format"),
    "run/no-version.json": (FormatError, "not a record of the format"),
    "run/not-json.json": (FormatError, "not a record of the format"),
    "run/not-utf8.json": (FormatError, "not a record of the format"),
    "run/run-too-long.json": (FormatError, "$.run"),
    "run/run-with-a-newline.json": (FormatError, "$.run"),
    "run/run-with-a-slash.json": (FormatError, "$.run"),
    "run/trailing-bytes.json": (FormatError, "not a record of the format"),
    "run/truncated.json": (FormatError, "not a record of the format"),
    "run/version-as-text.json": (FormatError, "$.format"),
    "shard/header-beyond-the-file.safetensors": (FormatError, "shard header of 4096 bytes in 62 bytes read"),
    "shard/header-not-json.safetensors": (FormatError, "not safetensors JSON"),
    "shard/header-too-long.safetensors": (FormatError, "shard header of 100000001 bytes in 62 bytes read"),
    "shard/name-twice.safetensors": (FormatError, "an object has the member 'a' twice"),
    "shard/piece-before-the-data.safetensors": (FormatError, "$.data_offsets[0]"),
    "shard/piece-of-another-size.safetensors": (FormatError, "a: lies at 0:8 of the data, expected 0:12"),
    "shard/piece-over-63-bits.safetensors": (FormatError, "$.shape[0]"),
    "shard/with-a-hole.safetensors": (FormatError, "b: lies at 2:3 of the data, expected 1:2"),
    "shard/with-an-overlap.safetensors": (FormatError, "b: lies at 1:3 of the data, expected 2:4"),
    "shard/without-a-header.safetensors": (FormatError, "a shard of 3 bytes has no header"),
    "tree/bytes-not-base64.json": (FormatError, "'bytes'"),
    "tree/bytes-with-loose-bits.json": (FormatError, "'bytes': not as base64 is written"),
    "tree/deque-longer-than-it-may-be.json": (FormatError, "'deque': more elements than its maxlen"),
    "tree/element-that-has-no-place-in-a-set.json": (FormatError, "'set'"),
    "tree/element-twice.json": (FormatError, "'set': an element twice"),
    "tree/float-cut-short.json": (FormatError, "'float'"),
    "tree/float-that-is-plain.json": (FormatError, "'float': not as such a number is written"),
    "tree/integer-in-decimal.json": (FormatError, "'int': not as an integer beyond 2**53 is written"),
    "tree/integer-that-is-plain.json": (FormatError, "'int': not as an integer beyond 2**53 is written"),
    "tree/item-that-is-no-pair.json": (FormatError, "'dict'"),
    "tree/key-that-is-no-key.json": (FormatError, "'dict': not a key that can be named: list"),
    "tree/key-twice.json": (FormatError, "'dict': duplicate key 'a'"),
    "tree/member-twice.json": (FormatError, "an object has the member 'v' twice"),
    "tree/nested-too-deep.json": (FormatError, "state tree nested deeper than 64 levels"),
    "tree/object-without-a-type.json": (FormatError, "state tree holds an object without a type"),
    "tree/per-rank-in-a-tree-of-one-rank.json": (FormatError, "no codec for per_rank"),
    "tree/plain-integer-too-large.json": (FormatError, "state tree: a plain number beyond 2**53"),
    "tree/string-that-is-plain.json": (FormatError, "'str': a string that stands for itself"),
    "tree/unknown-member.json": (FormatError, "'tuple': a member that its type does not have"),
    "tree/unknown-type.json": (FormatError, "no codec for later"),
}
"""File → the class that refuses it, and words of the message that show for which reason."""


def test_every_file_is_in_the_table() -> None:
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_a_rule_is_refused(name: str) -> None:
    error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        READERS[name.split("/")[0]]((FOLDER / name).read_bytes())
    assert type(caught.value) is error
    assert message in str(caught.value)
