"""What earlier releases wrote is read, byte for byte: one folder for each format version and case, never edited.

They are made by :mod:`tests.golden.write`, which says when that is allowed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load

from ckptd.checkpoint import catalog
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import region
from ckptd.checkpoint.retention import apply
from ckptd.checkpoint.run import Run as OpenRun
from ckptd.checkpoint.tensors import of_index, read_region
from ckptd.checkpoint.verify import verify
from ckptd.errors import UnsupportedFormat
from ckptd.format import index, keys, proof
from ckptd.format import records as record_types
from ckptd.format.cover import check_layout
from ckptd.format.digests import digest_blocks, hex_digest
from ckptd.format.dtypes import ITEM_BYTES
from ckptd.format.keys import Version, parse_version
from ckptd.format.lineage import line
from ckptd.format.names import piece_name
from ckptd.format.proof import prove
from ckptd.format.records import (
    Common,
    GenerationRecord,
    Index,
    Lease,
    Manifest,
    Mark,
    Receipt,
    ReceiptList,
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
from ckptd.storage import open_backend
from tests.golden.write import CASES, EARLY, FOLDER, SMALL_INDEX, SMALL_LISTS

ROOTS = sorted(path for path in FOLDER.glob("v*/*") if path.is_dir())
SIZE_MAX = 600_000


def _name(root: Path) -> str:
    return str(root.relative_to(FOLDER))


def objects(root: Path) -> dict[str, bytes]:
    """Key → bytes of a run as it lies on disk."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def kind_of(key: str, data: bytes) -> type[Record]:
    """What record must lie at a key, by its place alone."""
    folder, _, name = key.rpartition("/")
    if f"{folder}/".startswith(keys.CHECKPOINTS):
        if name.startswith("index-"):
            return Index
        if name.startswith("receipts-"):
            return ReceiptList
        if name == "common.json":
            return Common
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


FOREIGN = {"tensor", "ndarray", "npscalar", "enum", "codec", "per_rank"}
FOREIGN |= {"torch.dtype", "torch.device", "torch.Size", "torch.Generator"}
"""Tags that are not :mod:`ckptd.format.tree`'s own. It has to know all others."""


class Foreign:
    """A tagged value of another module, kept as it is."""

    def __init__(self, tag: str, members: dict[str, Any]) -> None:
        assert tag == members["$"]
        assert tag in FOREIGN
        self.members = members


def manifests(root: Path) -> dict[Version, Manifest]:
    return {record.version: record for _, _, record in records(root) if isinstance(record, Manifest)}


@contextlib.contextmanager
def small_limits(manifest: Manifest) -> Iterator[None]:
    """The limits under which a checkpoint was written that would otherwise be large."""
    with contextlib.ExitStack() as stack:
        if manifest.index is None:
            stack.enter_context(mock.patch.multiple(index, **SMALL_INDEX))
        if manifest.receipt_parts:
            stack.enter_context(mock.patch.multiple(proof, **SMALL_LISTS))
            stack.enter_context(mock.patch.multiple(catalog, **SMALL_LISTS))
        yield


def test_the_golden_directories_are_all_there_and_small() -> None:
    assert [_name(path) for path in ROOTS] == sorted(CASES)
    assert sum(len(data) for root in ROOTS for data in objects(root).values()) < SIZE_MAX


@pytest.mark.parametrize("root", ROOTS, ids=_name)
def test_r121_records_read_and_encode_to_the_same_bytes(root: Path) -> None:
    found = list(records(root))
    assert {type(record) for _, _, record in found} >= {Run, GenerationRecord}
    for key, data, record in found:
        assert encode(record) == data, key
        assert keys.KEY_PATTERN.fullmatch(key)


@pytest.mark.parametrize("root", ROOTS, ids=_name)
def test_r121_state_trees_read_and_encode_to_the_same_bytes(root: Path) -> None:
    for key, _, record in records(root):
        if isinstance(record, Receipt):
            snapshot = decode(record.snapshot, Snapshot)
            assert encode(snapshot) == bytes(record.snapshot), key
            assert encode(decode_layout(snapshot.layout)) == bytes(snapshot.layout), key
            state = decode_tree(decode_json(snapshot.tree), Foreign)
            again = encode_tree(state, lambda value, _: value.members if isinstance(value, Foreign) else None)
            assert msgspec.json.encode(again) == bytes(snapshot.tree), key


@pytest.mark.parametrize("root", ROOTS, ids=_name)
def test_r121_receipts_prove_the_same_manifest(root: Path) -> None:
    files = objects(root)
    for version, manifest in manifests(root).items():
        with small_limits(manifest):
            receipts = [files[keys.receipt_key(version, rank, manifest.world)] for rank in range(manifest.world)]
            commit = prove(receipts, early=root.parent.name == EARLY)
        assert encode(commit.manifest) == files[keys.manifest_key(version)]
        beside = {key for key in files if re.search(r"/(index-|receipts-|common)[^/]*$", key) and str(version) in key}
        assert commit.objects == {key: files[key] for key in beside}
        assert (manifest.index is None) == (root.name in ("index_in_parts", "large_world"))


@pytest.mark.parametrize("root", ROOTS, ids=_name)
def test_r121_shards_have_their_digests_and_open_with_safetensors(root: Path) -> None:
    files = objects(root)
    for _, _, receipt in records(root):
        if not isinstance(receipt, Receipt):
            continue
        proof_of, layout = receipt.shard, decode_layout(decode(receipt.snapshot, Snapshot).layout)
        pieces = check_layout(layout)
        shard = files[proof_of.key]
        elsewhere = [(files[other.key], extent) for other in proof_of.references for extent in other.extents]
        header_size = proof_of.bytes - (layout.shard_bytes - layout.header_bytes - sum(e.bytes for _, e in elsewhere))
        header, opened = read_header(shard), load(shard)
        digests = digest_blocks(memoryview(shard), block_bounds(header_size, [], proof_of.block_bytes))
        names = {
            id(piece): piece_name(entry.name, number, len(entry.pieces))
            for entry in layout.tensors
            for number, piece in enumerate(entry.pieces)
        }
        for piece in pieces:
            name = names[id(piece)]
            if name in header:
                _, _, start, stop = header[name]
                data = shard[start:stop]
                assert data == opened[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert elsewhere or start == piece.at
            else:
                ((other, extent),) = [item for item in elsewhere if 0 <= piece.at - item[1].start < item[1].bytes]
                start = extent.at + piece.at - extent.start
                data = other[start : start + piece.bytes]
            assert len(data) == piece.bytes
            digests += digest_blocks(memoryview(data), block_bounds(0, [piece.bytes], proof_of.block_bytes))
        assert digests == proof_of.blocks
        assert hex_digest(proof_of.blocks) == proof_of.digest
        assert len(shard) == proof_of.bytes
        for other in proof_of.references:
            assert len(files[other.key]) == other.bytes


@pytest.mark.parametrize("root", [root for root in ROOTS if root.name != "around"], ids=_name)
async def test_r121_checkpoints_verify_and_every_tensor_is_read(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "run")
    async with contextlib.aclosing(open_backend(f"file://{tmp_path}/run", None)) as backend:
        run = await OpenRun.open(backend)
        for version, manifest in manifests(root).items():
            with small_limits(manifest):
                found = await verify(run, version)
                assert found.good, found.reason
                async with await CheckpointReader.open(run, version) as reader:
                    entries = [entry async for entry in reader.entries()]
                    for entry in entries:
                        wanted = region(entry.shape)
                        out = bytearray(wanted.element_count * ITEM_BYTES[entry.dtype])
                        await read_region(reader, of_index(entry), wanted, memoryview(out))
                        found_pieces = await reader.locate(entry.name, wanted)
                        assert entry.grid or not out or len(found_pieces) == len(entry.pieces)
                    assert entries or manifest.bytes == 4096
                    decode_tree(decode_json((await reader.common()).tree), Foreign)


@pytest.mark.parametrize(("name", "formats"), [("v1_incremental", {1}), ("v2", {1, 2})])
def test_references_go_to_the_shard_that_holds_the_bytes(name: str, formats: set[int]) -> None:
    root = FOLDER / name / "frozen"
    assert {record.format for _, _, record in records(root)} == formats
    for _, _, record in records(root):
        if isinstance(record, Receipt | Manifest) and formats != {1}:
            refers = record.references if isinstance(record, Manifest) else record.shard.references
            assert record.format == (2 if refers else 1)
    first, second = str(Version(10, 1)), str(Version(20, 1))
    found = [manifest.references for _, manifest in sorted(manifests(root).items())]
    assert found == [(), (first,), (first, second), (first, second, str(Version(30, 2)))]
    sizes = [manifest.bytes for _, manifest in sorted(manifests(root).items())]
    assert sizes == [4096 + 480 + 24 + 70_002 + 9 + 16, 4096 + 70_002 + 16, 4096 + 16, 4096]
    assert {manifest.held_bytes for manifest in manifests(root).values()} >= {sizes[0]}


async def test_r121_a_reader_from_before_says_that_a_newer_release_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knows format 1 only calls nothing damaged, and deletes nothing."""
    shutil.copytree(FOLDER / "v2" / "frozen", tmp_path / "run")
    monkeypatch.setattr(record_types, "newest_format", lambda kind: 1)
    newer = "written by a newer release: format version 2, and this one reads 1"
    async with contextlib.aclosing(open_backend(f"file://{tmp_path}/run", None)) as backend:
        run = await OpenRun.open(backend)
        assert (await verify(run, Version(10, 1))).good
        for version in (Version(20, 1), Version(40, 2)):
            with pytest.raises(UnsupportedFormat, match=newer):
                await verify(run, version)
        with pytest.raises(UnsupportedFormat, match=newer):
            await apply(run, Keep(last=1), generation=2, grace_seconds=0)
        assert len(await run.committed()) == 4
        assert await run.standings() == {}


def test_the_line_goes_through_generations() -> None:
    root = FOLDER / EARLY / "two_ranks"
    found = manifests(root)
    parents = {version.generation: m.parent and m.parent.version for version, m in found.items()}
    assert line(found, parents) == [Version(30, 2), Version(20, 1)]
    opened = [record.opened_from for _, _, record in records(root) if isinstance(record, GenerationRecord)]
    assert [parent and parent.version for parent in opened] == [None, Version(20, 1)]


def test_what_the_code_writes_now_is_what_lies_there() -> None:
    """Before the first release only: afterwards a record may gain members, and then this goes."""
    for root in ROOTS:
        assert CASES[_name(root)]() == objects(root), "see tests/golden/write.py"


def test_what_names_a_checkpoint_beside_it_is_the_version() -> None:
    for key, _, record in records(FOLDER / EARLY / "around"):
        if isinstance(record, Mark | Tombstone):
            assert parse_version(record.version) == Version(10, 1)
            assert record.version in key
