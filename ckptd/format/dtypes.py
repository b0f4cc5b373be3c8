"""Names and sizes of tensor element types, as in safetensors headers.

A type that safetensors lacks is stored as ``U8`` with a last dimension of its item size; the receipt keeps its true
name, which is torch's (``complex128``). So every reader of safetensors can open a shard, and ckptd loses nothing.
"""

from __future__ import annotations

from types import MappingProxyType

ITEM_BYTES = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
        "int16": 2,
        "uint16": 2,
        "float16": 2,
        "bfloat16": 2,
        "int32": 4,
        "uint32": 4,
        "float32": 4,
        "complex32": 4,
        "int64": 8,
        "uint64": 8,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Every element type the format knows, by torch's name."""

_SAFETENSORS = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "int16": "I16",
        "uint16": "U16",
        "float16": "F16",
        "bfloat16": "BF16",
        "int32": "I32",
        "uint32": "U32",
        "float32": "F32",
        "int64": "I64",
        "uint64": "U64",
        "float64": "F64",
    }
)

STORED_BYTES = MappingProxyType({native: ITEM_BYTES[name] for name, native in _SAFETENSORS.items()})
"""Item size of each dtype that a shard's header may name."""


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape under which a piece of this dtype and shape lies in the shard."""
    native = _SAFETENSORS.get(dtype)
    return (native, shape) if native is not None else ("U8", (*shape, ITEM_BYTES[dtype]))


def element_count(shape: tuple[int, ...]) -> int:
    """1 for a scalar."""
    count = 1
    for length in shape:
        count *= length
    return count
