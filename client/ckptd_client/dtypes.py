"""torch dtypes and the format's names for them."""

from __future__ import annotations

import torch

from ckptd.errors import StateError
from ckptd.format.dtypes import ITEM_BYTES

_BY_NAME = {name: dtype for name in ITEM_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name. Raises :class:`StateError` for a type that the format does not know."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise StateError(
            f"tensors of {dtype} cannot be saved", hint="convert it, or keep it out of the state"
        ) from None


def torch_dtype(name: str) -> torch.dtype:
    """Raises :class:`StateError` for a type that the installed torch lacks."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise StateError(f"the installed torch {torch.__version__} has no dtype {name}") from None
