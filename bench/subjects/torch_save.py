"""``torch.save`` and ``torch.load``, as most training scripts call them."""

from __future__ import annotations

import torch

from bench.subject import Done, Handle, Promises, Subject


class TorchSave(Subject):
    """One file, written while the training waits."""

    promises = Promises(fsync=False, digest="CRC-32", commit="", software=f"torch {torch.__version__}")

    def save(self, step: int) -> Handle:
        torch.save(self.state.state_dict(), self.stored(step))
        return Done()

    def restore(self, step: int) -> None:
        self.state.load_state_dict(torch.load(self.stored(step), weights_only=True, mmap=True))
