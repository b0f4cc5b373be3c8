"""Shards: files that safetensors itself opens, laid out without holes, whose digest blocks are a partition."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from ckptd.errors import FormatError, StateError
from ckptd.format import shard
from ckptd.format.digests import DIGEST_BYTES, digest, digest_blocks, hex_digest
from ckptd.format.dtypes import ITEM_BYTES, STORED_BYTES, element_count, stored_as
from ckptd.format.shard import (
    StoredPiece,
    block_bounds,
    block_count,
    file_order,
    lay_out,
    read_header,
)
from ckptd.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    GIB,
    HEADER_BYTES_MAX,
    INTEGER_MAX,
    NAME_BYTES_MAX,
    PAGE_BYTES,
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
stored = st.builds(StoredPiece, name=names, dtype=st.sampled_from(sorted(ITEM_BYTES)), shape=shapes)
piece_lists = st.lists(stored, max_size=8, unique_by=lambda piece: piece.name)


def filled(pieces: list[StoredPiece]) -> tuple[shard.ShardLayout, bytearray, dict[str, bytes]]:
    """A laid out file, and what each piece in it holds."""
    laid = lay_out(pieces)
    data = bytearray(laid.header).ljust(laid.size_bytes, b"\0")
    held: dict[str, bytes] = {}
    for number, (piece, at) in enumerate(zip(pieces, laid.offsets, strict=True)):
        # Bytes below 2 suit every dtype, bool included.
        held[piece.name] = bytes((number + i // 3) % 2 for i in range(piece.size_bytes))
        data[at : at + piece.size_bytes] = held[piece.name]
    return laid, data, held


@given(piece_lists)
def test_safetensors_opens_what_is_laid_out(pieces: list[StoredPiece]) -> None:
    laid, data, held = filled(pieces)
    opened = load(bytes(data))
    assert opened.keys() == held.keys()
    for piece, at in zip(pieces, laid.offsets, strict=True):
        tensor = opened[piece.name]
        dtype, shape = stored_as(piece.dtype, piece.shape)
        assert tuple(tensor.shape) == shape
        if dtype != "U8":
            assert tensor.dtype == getattr(torch, piece.dtype)
        assert tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == held[piece.name]
        assert at % ITEM_BYTES[piece.dtype] == 0
    assert len(laid.header) % PAGE_BYTES == 0


@given(piece_lists)
def test_a_header_reads_back(pieces: list[StoredPiece]) -> None:
    laid, data, _ = filled(pieces)
    assert read_header(data) == read_header(laid.header)
    for piece, at in zip(pieces, laid.offsets, strict=True):
        assert read_header(laid.header)[piece.name] == (
            *stored_as(piece.dtype, piece.shape),
            at,
            at + piece.size_bytes,
        )


@given(piece_lists)
def test_pieces_fill_the_file_large_items_first(pieces: list[StoredPiece]) -> None:
    laid = lay_out(pieces)
    position = len(laid.header)
    for number in file_order(pieces):
        assert laid.offsets[number] == position
        position += pieces[number].size_bytes
    assert position == laid.size_bytes
    sizes = [ITEM_BYTES[pieces[number].dtype] for number in file_order(pieces)]
    assert sizes == sorted(sizes, reverse=True)


def test_values_of_every_dtype_come_back_through_safetensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randint(0, 2, (3, 16), generator=generator, dtype=torch.uint8).view(getattr(torch, name))
        for name in ITEM_BYTES
    }
    pieces = [StoredPiece(name, name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    laid = lay_out(pieces)
    data = bytearray(laid.header).ljust(laid.size_bytes, b"\0")
    for tensor, at in zip(tensors.values(), laid.offsets, strict=True):
        raw = tensor.view(torch.uint8).numpy().tobytes()
        data[at : at + len(raw)] = raw
    file = tmp_path / "shard.safetensors"
    file.write_bytes(data)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"ckptd": "1"}
        for name, tensor in tensors.items():
            found = opened.get_tensor(name)
            # A type that safetensors lacks comes as bytes, with a last dimension of its item size.
            raw = tensor.view(torch.uint8)
            assert torch.equal(found.view(torch.uint8).reshape(raw.shape), raw)


@pytest.mark.parametrize("size", [2**31, 2**32, 2**33 + 8])
def test_r02_sizes_beyond_32_bits_are_exact_everywhere(size: int) -> None:
    pieces = [
        StoredPiece("small", "int64", (1,)),
        StoredPiece("huge", "uint8", (size,)),
        StoredPiece("wide", "complex128", (2, size // 8)),
        StoredPiece("after", "uint8", (3,)),
    ]
    laid = lay_out(pieces)
    start = len(laid.header)
    assert [at - start for at in laid.offsets] == [4 * size, 4 * size + 8, 0, 5 * size + 8]
    assert laid.size_bytes == start + 5 * size + 11
    assert read_header(laid.header)["huge"] == ("U8", (size,), start + 4 * size + 8, start + 5 * size + 8)
    counts = [block_count(pieces[number].size_bytes) for number in file_order(pieces)]
    assert counts == [-(-4 * size // BLOCK_BYTES_MAX), 1, -(-size // BLOCK_BYTES_MAX), 1]
    assert sum(1 for _ in block_bounds(0, [size])) == counts[2]


def test_r02_offsets_go_up_to_63_bits() -> None:
    laid = lay_out([StoredPiece("a", "uint8", (2**62,)), StoredPiece("b", "uint8", (2**62 - 1,))])
    assert read_header(laid.header)["b"][3] - len(laid.header) == INTEGER_MAX


@given(st.integers(0, 3 * BLOCK_BYTES_MAX), st.lists(st.integers(0, 3 * BLOCK_BYTES_MAX), max_size=6))
def test_blocks_are_a_partition_and_never_cross_a_piece(header_bytes: int, sizes: list[int]) -> None:
    for block_bytes in (BLOCK_BYTES_MIN, 3 * BLOCK_BYTES_MIN + 4096, BLOCK_BYTES_MAX):
        check_blocks(header_bytes, sizes, block_bytes)
    assert list(block_bounds(header_bytes, sizes)) == list(block_bounds(header_bytes, sizes, BLOCK_BYTES_MAX))


def check_blocks(header_bytes: int, sizes: list[int], block_bytes: int) -> None:
    bounds = list(block_bounds(header_bytes, sizes, block_bytes))
    total = header_bytes + sum(sizes)
    assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), total]
    assert all(0 < stop - start <= block_bytes for start, stop in bounds)
    edges = {header_bytes}
    for size in sizes:
        edges.add(max(edges) + size)
    assert edges - {0} <= {stop for _, stop in bounds}
    assert len(bounds) == sum(block_count(size, block_bytes) for size in (header_bytes, *sizes))


def test_digests_are_xxh3_128_most_significant_byte_first() -> None:
    # From the specification's own test vectors: XXH3_128bits("") with seed 0.
    assert hex_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest(b"abc").hex() == hex_digest(memoryview(b"abc"))
    data = memoryview(bytes(range(100)))
    packed = digest_blocks(data, [(0, 10), (10, 100)])
    assert packed == digest(data[:10]) + digest(data[10:])
    assert len(packed) == 2 * DIGEST_BYTES


def test_names_must_be_free_and_short() -> None:
    twice = [StoredPiece("a", "uint8", (1,)), StoredPiece("a", "uint8", (2,))]
    with pytest.raises(StateError, match="a: two pieces of the state have this name"):
        lay_out(twice)
    lay_out([StoredPiece("\u00e9" * (NAME_BYTES_MAX // 2), "uint8", (1,))])
    with pytest.raises(StateError, match="more than 4096 bytes"):
        lay_out([StoredPiece("\u00e9" * (NAME_BYTES_MAX // 2 + 1), "uint8", (1,))])


def test_a_header_that_grows_too_long_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "HEADER_BYTES_MAX", 2 * PAGE_BYTES)
    lay_out([StoredPiece(f"{i}", "uint8", (1,)) for i in range(100)])
    with pytest.raises(StateError, match="200 pieces make a header of"):
        lay_out([StoredPiece(f"{i}", "uint8", (1,)) for i in range(200)])


def headed(header: object, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


MALFORMED = {
    "empty": b"",
    "short": b"\0" * 7,
    "no text": headed(b""),
    "length beyond the data": headed({}, 100),
    "length beyond the limit": headed({}, HEADER_BYTES_MAX + 1),
    "length with the sign bit": headed({}, 2**63),
    "not JSON": headed(b"{"),
    "not UTF-8": headed(b'{"\xff":1}'),
    "an array": headed([]),
    "deep": headed(b'{"a":' * 100_000),
    "deep inside": headed(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"more":' + b"[" * 100_000 + b"}}"),
    "a name twice": headed(b'{"a":%b,"a":%b}' % ((json.dumps(entry(0, 1)).encode(),) * 2)),
    "a member twice": headed(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[9,9],"data_offsets":[0,1]}}'),
    "a hole": headed({"a": entry(0, 1), "b": entry(2, 3)}),
    "a hole at the start": headed({"a": entry(1, 2)}),
    "an overlap": headed({"a": entry(0, 2), "b": entry(1, 3)}),
    "the same bytes twice": headed({"a": entry(0, 2), "b": entry(0, 2)}),
    "backwards": headed({"a": entry(2, 0, shape=[0])}),
    "negative": headed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}),
    "negative shape": headed({"a": entry(0, 1, shape=[-1])}),
    "over 63 bits": headed({"a": entry(0, 2**63)}),
    "over 64 bits": headed({"a": entry(0, 2**64)}),
    "shape too large": headed({"a": entry(0, 8, "F32", [3])}),
    "shape that overflows": headed({"a": entry(0, 0, "F32", [2**32, 2**32])}),
    "65 dimensions": headed({"a": entry(0, 1, shape=[1] * 65)}),
    "no dtype": headed({"a": {"shape": [], "data_offsets": [0, 1]}}),
    "one offset": headed({"a": {"dtype": "U8", "shape": [], "data_offsets": [0]}}),
    "a float": headed({"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1.0]}}),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_headers_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_header(data)


@given(st.binary(max_size=100))
def test_any_bytes_raise_only_format_error(data: bytes) -> None:
    for raw in (data, headed(data)):
        with contextlib.suppress(FormatError):
            read_header(raw)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.builds(
            lambda dtype, shape, start, stop: {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]},
            st.sampled_from(["U8", "I16", "F32"]),
            st.lists(st.integers(0, 3), max_size=2),
            st.integers(0, 6),
            st.integers(0, 6),
        ),
        max_size=3,
    )
)
def test_what_is_read_is_what_safetensors_reads(header: dict[str, Any]) -> None:
    """With as much data behind the header as it speaks of, both accept or both refuse."""
    size = max((found["data_offsets"][1] for found in header.values()), default=0)
    file = headed(header) + bytes(size)
    try:
        theirs = {name: tuple(tensor.shape) for name, tensor in load(file).items()}
    except SafetensorError:
        with pytest.raises(FormatError):
            read_header(file)
    else:
        assert {name: shape for name, (_, shape, _, _) in read_header(file).items()} == theirs


def test_a_foreign_file_reads_too(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"b": np.arange(3.0), "a": np.ones((2, 2), np.float32)}, tmp_path / "x", {"who": "somebody"})
    found = read_header((tmp_path / "x").read_bytes())
    assert {name: (dtype, shape) for name, (dtype, shape, _, _) in found.items()} == {
        "a": ("F32", (2, 2)),
        "b": ("F64", (3,)),
    }
    assert read_header(headed({"a": entry(0, 3, "F4_OF_LATER", [6])}))["a"][0] == "F4_OF_LATER"


def test_stored_types_have_the_item_sizes_of_their_own() -> None:
    assert STORED_BYTES["U8"] == 1
    for name, size in ITEM_BYTES.items():
        native, shape = stored_as(name, (2, 3))
        assert STORED_BYTES[native] * element_count(shape) == 6 * size
        assert getattr(torch, name).itemsize == size


def test_a_file_of_many_gib_is_described_at_once() -> None:
    laid = lay_out([StoredPiece("a", "float32", (GIB,))])
    bounds = block_bounds(len(laid.header), [4 * GIB])
    assert next(bounds) == (0, len(laid.header))
    assert next(bounds) == (len(laid.header), len(laid.header) + BLOCK_BYTES_MAX)
