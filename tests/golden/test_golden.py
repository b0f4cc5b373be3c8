"""What earlier releases wrote is read, byte for byte: one folder for each format version and case, never edited.

They are made by ``python -m tests.golden.write --regenerate``, which says when that is allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load

from ckptd.format import keys, proof
from ckptd.format.cover import check_layout
from ckptd.format.digests import digest_blocks, hex_digest
from ckptd.format.keys import Version, parse_version
from ckptd.format.lineage import line
from ckptd.format.names import piece_name
from ckptd.format.proof import prove
from ckptd.format.records import (
    GenerationRecord,
    Index,
    Lease,
    Manifest,
    Mark,
    Receipt,
    Record,
    Run,
    Skipped,
    Snapshot,
    Tombstone,
    decode,
    decode_layout,
    encode,
)
from ckptd.format.shard import block_bounds, read_header
from ckptd.format.tree import decode_json, decode_tree, encode_tree
from tests.golden.write import CASES, FOLDER, SMALL_INDEX

ROOTS = sorted(path for path in FOLDER.iterdir() if path.is_dir())
SIZE_MAX = 200_000


def objects(root: Path) -> dict[str, bytes]:
    """Key → bytes of a run as it lies on disk."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def kind_of(key: str, data: bytes) -> type[Record]:
    """What record must lie at a key, by its place alone."""
    folder, _, name = key.rpartition("/")
    if f"{folder}/".startswith(keys.CHECKPOINTS):
        if name.startswith("index-"):
            return Index
        return Skipped if b'"kind":"skipped"' in data else Receipt
    return {
        "": Run,
        keys.GENERATIONS: GenerationRecord,
        keys.MANIFESTS: Manifest,
        keys.MARKS: Mark,
        keys.LEASES: Lease,
        keys.TOMBSTONES: Tombstone,
    }[f"{folder.split('/')[0]}/" if folder else ""]


def records(root: Path) -> Iterator[tuple[str, bytes, Record]]:
    for key, data in objects(root).items():
        if key.endswith(".json"):
            yield key, data, decode(data, kind_of(key, data))


class Foreign:
    """A tagged value of another module, kept as it is."""

    def __init__(self, tag: str, members: dict[str, Any]) -> None:
        assert tag == members["$"]
        self.members = members


def manifests(root: Path) -> dict[Version, Manifest]:
    return {record.version: record for _, _, record in records(root) if isinstance(record, Manifest)}


def test_the_golden_directories_are_all_there_and_small() -> None:
    assert [path.name for path in ROOTS] == sorted(CASES)
    assert sum(len(data) for root in ROOTS for data in objects(root).values()) < SIZE_MAX


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_r121_records_read_and_encode_to_the_same_bytes(root: Path) -> None:
    found = list(records(root))
    assert {type(record) for _, _, record in found} >= {Run, GenerationRecord}
    for key, data, record in found:
        assert encode(record) == data, key
        assert keys.KEY_PATTERN.fullmatch(key)


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_r121_state_trees_read_and_encode_to_the_same_bytes(root: Path) -> None:
    for key, _, record in records(root):
        if isinstance(record, Receipt):
            snapshot = decode(record.snapshot, Snapshot)
            assert encode(snapshot) == bytes(record.snapshot), key
            assert encode(decode_layout(snapshot.layout)) == bytes(snapshot.layout), key
            state = decode_tree(decode_json(snapshot.tree), Foreign)
            again = encode_tree(state, lambda value, _: value.members if isinstance(value, Foreign) else None)
            assert msgspec.json.encode(again) == bytes(snapshot.tree), key


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_r121_receipts_prove_the_same_manifest(root: Path) -> None:
    files = objects(root)
    for version, manifest in manifests(root).items():
        with mock.patch.multiple(proof, **SMALL_INDEX) if manifest.index is None else contextlib.nullcontext():
            commit = prove([files[ref.key] for ref in manifest.receipts])
        assert encode(commit.manifest) == files[keys.manifest_key(version)]
        assert dict(commit.index_parts) == {ref.key: files[ref.key] for ref in manifest.index_parts}
        assert (manifest.index is None) == (root.name == "index_in_parts")


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.name)
def test_r121_shards_have_their_digests_and_open_with_safetensors(root: Path) -> None:
    files = objects(root)
    for _, _, receipt in records(root):
        if not isinstance(receipt, Receipt):
            continue
        shard, layout = files[receipt.shard.key], decode_layout(decode(receipt.snapshot, Snapshot).layout)
        pieces = check_layout(layout)
        bounds = block_bounds(layout.header_bytes, [piece.bytes for piece in pieces])
        assert digest_blocks(memoryview(shard), bounds) == receipt.shard.blocks
        assert hex_digest(receipt.shard.blocks) == receipt.shard.digest
        assert len(shard) == receipt.shard.bytes
        header, opened = read_header(shard), load(shard)
        for entry in layout.tensors:
            for number, piece in enumerate(entry.pieces):
                name = piece_name(entry.name, number, len(entry.pieces))
                assert header[name][2:] == (piece.at, piece.at + piece.bytes)
                data = opened[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert data == shard[piece.at : piece.at + piece.bytes]


def test_the_line_goes_through_generations() -> None:
    root = FOLDER / "two_ranks"
    found = manifests(root)
    parents = {version.generation: m.parent and m.parent.version for version, m in found.items()}
    assert line(found, parents) == [Version(30, 2), Version(20, 1)]
    opened = [record.opened_from for _, _, record in records(root) if isinstance(record, GenerationRecord)]
    assert [parent and parent.version for parent in opened] == [None, Version(20, 1)]


def test_what_the_code_writes_now_is_what_lies_there() -> None:
    """Before the first release only: afterwards a record may gain members, and then this goes."""
    for root in ROOTS:
        assert CASES[root.name]() == objects(root), "see tests/golden/write.py"


def test_what_names_a_checkpoint_beside_it_is_the_version() -> None:
    for key, _, record in records(FOLDER / "around"):
        if isinstance(record, Mark | Tombstone):
            assert parse_version(record.version) == Version(10, 1)
            assert record.version in key
