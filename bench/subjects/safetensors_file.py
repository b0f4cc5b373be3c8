"""``safetensors.torch.save_file``: the tensors alone, by flat names."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, cast

import safetensors
from safetensors import torch as safetensors_torch

from bench.subject import Done, Handle, Promises, Subject

_files = cast(Any, safetensors)  # whose own types are incomplete
_tensors = cast(Any, safetensors_torch)


class Safetensors(Subject):
    """One file, written while the training waits. Read back tensor by tensor, the fastest way that it has."""

    promises = Promises(fsync=False, digest="", commit="", software=f"safetensors {version('safetensors')}")

    def save(self, step: int) -> Handle:
        _tensors.save_file(self.state.tensors(), self.stored(step))
        return Done()

    def restore(self, step: int) -> None:
        with _files.safe_open(self.stored(step), framework="pt") as file:
            self.state.load_tensors({name: file.get_tensor(name) for name in self.state.tensors()})
