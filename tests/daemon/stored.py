"""What a run's folder holds after the daemon has written: looked at without any of the daemon's own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptd.format.cover import check_layout
from ckptd.format.digests import digest_blocks
from ckptd.format.keys import Version, manifest_key, receipt_key
from ckptd.format.records import (
    Manifest,
    Receipt,
    Snapshot,
    decode,
    decode_layout,
)
from ckptd.format.shard import block_bounds
from tests.daemon.trainer import Member


def run_folder(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def manifest(url: str, version: Version) -> Manifest | None:
    """``None`` where it is not committed."""
    try:
        return decode((run_folder(url) / manifest_key(version)).read_bytes(), Manifest)
    except FileNotFoundError:
        return None


def receipt(url: str, version: Version, rank: int, world: int) -> bytes | None:
    try:
        return (run_folder(url) / receipt_key(version, rank, world)).read_bytes()
    except FileNotFoundError:
        return None


def check_committed(member: Member, step: int, *, size: int = 300_000) -> Manifest:
    """A committed checkpoint whose every byte is that of the snapshots; and no shard that no receipt names."""
    version = Version(step, member.generation)
    found = manifest(member.url, version)
    assert found is not None, f"{version} is not committed"
    folder = run_folder(member.url)
    named: set[str] = set()
    for ref in found.receipts:
        data = (folder / ref.key).read_bytes()
        proof = decode(data, Receipt)
        content = replace(member, rank=ref.rank).content(step, size)
        assert bytes(proof.snapshot) == content.doc
        stored = (folder / proof.shard.key).read_bytes()
        assert stored == content.shard
        layout = decode_layout(decode(proof.snapshot, Snapshot).layout)
        sizes = [piece.bytes for piece in check_layout(layout)]
        bounds = block_bounds(layout.header_bytes, sizes, proof.shard.block_bytes)
        assert proof.shard.blocks == digest_blocks(memoryview(stored), bounds)
        named.add(proof.shard.key)
    shards = folder.glob(f"checkpoints/{version}/*.safetensors")
    assert {path.relative_to(folder).as_posix() for path in shards} == named
    return found


# A trainer to be killed
