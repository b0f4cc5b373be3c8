"""Orbax's ``AsyncCheckpointer``, of the JAX world: it is given the tensors as NumPy arrays."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from bench.subject import Handle, Promises, Subject

_library: Any = import_module("orbax.checkpoint")
_torch: Any = torch
_bfloat16: Any = import_module("ml_dtypes").bfloat16


class _Saving(Handle):
    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def wait_copied(self) -> None:
        pass  # the call has copied everything

    def wait_durable(self) -> None:
        self._checkpointer.wait_until_finished()


class Orbax(Subject):
    """As it comes, which is with compression."""

    promises = Promises(
        fsync=True,
        digest="CRC-32C of the index",
        commit="folder's rename",
        software=f"orbax-checkpoint {version('orbax-checkpoint')}",
    )
    compression = True

    def open(self) -> None:
        handler = _library.PyTreeCheckpointHandler(use_compression=self.compression)
        self._checkpointer = _library.AsyncCheckpointer(handler)

    def save(self, step: int) -> Handle:
        arrays = {name: _as_array(tensor) for name, tensor in self.state.tensors().items()}
        self._checkpointer.save(self.stored(step).absolute(), args=_library.args.PyTreeSave(arrays))
        return _Saving(self._checkpointer)

    def restore(self, step: int) -> None:
        arrays = self._checkpointer.restore(self.stored(step).absolute())
        self.state.load_tensors({name: _as_tensor(array) for name, array in arrays.items()})

    def close(self) -> None:
        self._checkpointer.close()


class Uncompressed(Orbax):
    """Without compression."""

    compression = False


def _as_array(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_bfloat16)
    return tensor.numpy()


def _as_tensor(array: Any) -> torch.Tensor:
    plain: torch.Tensor = _torch.from_numpy(array.view("int16") if array.dtype == _bfloat16 else array)
    return plain.view(torch.bfloat16) if array.dtype == _bfloat16 else plain
