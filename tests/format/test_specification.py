"""``docs/FORMAT.md`` says what the code does: members in their order, dtypes, types of the tree, limits and keys."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ckptd import limits
from ckptd.format import keys, tree
from ckptd.format.dtypes import ITEM_BYTES, stored_as
from ckptd.format.keys import GENERATION_MAX, RANK_MAX, STEP_MAX, Version
from ckptd.format.log import Log, Segment
from ckptd.format.records import (
    FORMAT,
    Common,
    Extent,
    GenerationRecord,
    Grid,
    Index,
    IndexEntry,
    IndexRef,
    Layout,
    Lease,
    Manifest,
    Mark,
    ObjectRef,
    Parent,
    Piece,
    RankRun,
    Receipt,
    ReceiptList,
    ReceiptRef,
    Reference,
    Run,
    ShardProof,
    Skipped,
    Snapshot,
    TensorEntry,
    Tombstone,
)

TEXT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
SECTIONS = {title.split(" — ")[0]: body for title, body in re.findall(r"(?ms)^##+ ([^\n]+)\n(.*?)(?=^##+ |\Z)", TEXT)}
NAME = r"`([a-z_]+)`"


def members(struct: type[msgspec.Struct]) -> list[str]:
    """Of a record beyond its head, or of a part of one, in order."""
    return [field.name for field in msgspec.structs.fields(struct) if field.name not in ("format", "kind")]


def listed(section: str) -> list[str]:
    """Members in the first column of a section's tables; those of an object inside one are led by a dot."""
    rows = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    found = [name for row in rows for name in re.findall(NAME, row.split("|")[1])]
    return [name for name in found if name not in ("format", "kind")]


def named(text: str) -> list[str]:
    """Members that the first sentence lists, without what it says of their values."""
    sentence = re.split(r"[.:]\s", re.sub(r"\([^)]*\)", "", text))[0]
    return re.findall(NAME, sentence)


@pytest.mark.parametrize(
    ("section", "struct"),
    [("run", Run), ("generation", GenerationRecord), ("receipt", Receipt), ("manifest", Manifest)],
)
def test_tables_have_the_members_of_records_in_their_order(section: str, struct: type[msgspec.Struct]) -> None:
    assert listed(section) == members(struct)


def test_tables_have_the_members_of_layouts_and_pieces() -> None:
    assert listed("layout") == members(Layout) + members(Piece)
    shard = re.findall(rf"(?m)^\| · {NAME}", SECTIONS["receipt"])
    assert shard == members(ShardProof)


def test_sentences_have_the_members_of_the_other_records_in_their_order() -> None:
    order = SECTIONS["snapshot"].split("Order:")[1]
    assert named(order) == members(Snapshot)
    for section, struct in (
        ("skipped", Skipped),
        ("index", Index),
        ("receipts", ReceiptList),
        ("common", Common),
        ("mark", Mark),
        ("lease", Lease),
        ("tombstone", Tombstone),
    ):
        assert named(SECTIONS[section]) == members(struct)


@pytest.mark.parametrize(
    "struct",
    [ShardProof, Reference, Extent, TensorEntry, IndexEntry, Grid, RankRun, IndexRef, ObjectRef, ReceiptRef, Parent],
)
def test_objects_inside_records_are_written_out(struct: type[msgspec.Struct]) -> None:
    assert "{" + ", ".join(f'"{name}"' for name in members(struct)) + "}" in TEXT


def test_every_dtype_is_there_as_it_is_stored() -> None:
    native, as_bytes = SECTIONS["Dtypes"].split("Stored as U8")
    for name in ITEM_BYTES:
        dtype, shape = stored_as(name, ())
        if shape:
            assert f"`{name}`" in as_bytes
            assert re.search(rf"`{name}`[^()]*\({shape[0]}\)", as_bytes)
        else:
            assert re.search(rf"`{name}`\s{dtype}\b", native)
    assert set(re.findall(r"`([a-z0-9_]+)`", SECTIONS["Dtypes"])) == set(ITEM_BYTES)


def test_every_type_of_the_state_tree_is_there() -> None:
    table = {
        name for row in re.findall(r"(?m)^\| (`.*?) \|", SECTIONS["State tree"]) for name in re.findall(r"`(.+?)`", row)
    }
    elsewhere = {"tensor", "ndarray", "npscalar", "enum", "codec", tree.PER_RANK} | {
        name for name in table if name.startswith("torch.")
    }
    assert table - {"$"} == tree._TAGS | elsewhere


def test_the_log_is_there_with_its_members_in_their_order() -> None:
    assert named(SECTIONS["log"]) == members(Log)
    assert listed("log") == members(Segment)


def test_the_values_of_marks_and_leases_are_there() -> None:
    for section, struct, name in (("mark", Mark, "mark"), ("lease", Lease, "purpose")):
        for value in msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"][name]["enum"]:
            assert f"`{value}`" in SECTIONS[section]


def test_limits_are_those_of_the_code() -> None:
    for limit, text in (
        (limits.HEADER_BYTES_MAX, "| shard header | 100,000,000 bytes |"),
        (limits.RECEIPT_BYTES_MAX // limits.MIB, "| receipt | 512 MiB |"),
        (limits.MANIFEST_BYTES_MAX // limits.MIB, "| manifest | 64 MiB |"),
        (limits.SMALL_RECORD_BYTES_MAX // limits.MIB, "mark, lease, tombstone | 1 MiB |"),
        (limits.LOG_SEGMENT_BYTES_MAX // limits.MIB, "| log | 4 MiB;"),
        (limits.LOG_SEGMENT_ROWS_MAX, "| `steps` | array of steps | 1 to 1,024"),
        (limits.LOG_COLUMNS_MAX, "at most 64 names of"),
        (limits.LOG_NAME_BYTES_MAX, "at most 63 bytes of UTF-8"),
        (limits.INDEX_INLINE_BYTES_MAX // limits.KIB, "at most 256 KiB, else in parts"),
        (limits.INDEX_PART_BYTES_TARGET // limits.MIB, "with the lists that they name, at most 4 MiB"),
        (limits.RECEIPTS_INLINE_MAX, "inside up to 256 ranks, else that many in each part"),
        (limits.BLOCK_BYTES_MAX, "absent means 1,048,576"),
        (limits.BLOCK_BYTES_MIN, "a multiple of 4,096 from 65,536 to"),
        (limits.BLOCK_BYTES_WRITTEN, "ckptd writes blocks of 131,072 bytes"),
        (limits.PAGE_BYTES, "starts at a multiple of 4,096"),
        (limits.NAME_BYTES_MAX, "at most 4,096 bytes of UTF-8"),
        (limits.TENSOR_DIMS_MAX, "of at most 64 sizes"),
        (limits.TREE_DEPTH_MAX, "nesting beyond 64 levels"),
        (int(limits.LEASE_SECONDS), "It holds until 60 s after"),
        (int(limits.TOMBSTONE_SECONDS), "once it is 3,600 s old"),
        (RANK_MAX, "0 to 99,999. **world**"),
        (FORMAT, "# The format, version 2"),
    ):
        assert text in TEXT, text
        assert f"{limit:,}" in text or str(limit) in text
    assert (STEP_MAX, GENERATION_MAX, limits.INTEGER_MAX) == (10**12 - 1, 10**6 - 1, 2**63 - 1)


def test_keys_are_those_of_the_table() -> None:
    version = Version(1000, 3)
    made = {
        keys.RUN,
        keys.generation_key(3),
        keys.shard_key(version, 1, 2, "token"),
        keys.receipt_key(version, 1, 2),
        keys.index_key(version, 4),
        keys.receipts_key(version, 4),
        keys.common_key(version),
        keys.manifest_key(version),
        keys.mark_key(version, "pinned", "token"),
        keys.tombstone_key(version),
        keys.exchanged_key(0, keys.receipt_key(version, 1, 2)),
        keys.copy_key(0, version),
        keys.probe_key("token"),
        str(keys.LogKey(3, 1, "f" * 32, 5, 7)),
    }
    values = {
        "version": "000000001000-g000003",
        "generation": "000003",
        "rank": "00001",
        "world": "00002",
        "part": "00004",
        "tier": "0",
    }
    values |= {"attempt": "token", "mark": "pinned", "token": "token"}
    values |= {"life": "f" * 32, "first": "000000000005", "last": "000000000007"}
    rows = re.findall(r"(?m)^\| `([^`]+)`", SECTIONS["Names"])
    filled = {re.sub(r"<([a-z ]+)>", lambda match: values.get(match[1], "?"), row) for row in rows}
    assert made == {key for key in filled if not key.startswith((keys.LEASES, keys.AGREEMENT))}
    assert "`000000001000-g000003`" in TEXT
