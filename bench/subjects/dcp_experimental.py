"""The experimental asynchronous checkpointer beside ``torch.distributed.checkpoint``: ``torch.save`` in a process."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

from bench.subject import Handle, Promises, Subject
from bench.subjects.dcp_save import no_cuda_options


class _Saving(Handle):
    def __init__(self, copied: Future[Any], written: Future[Any]) -> None:
        self._copied = copied
        self._written = written

    def wait_copied(self) -> None:
        self._copied.result()

    def wait_durable(self) -> None:
        self._written.result()


class Experimental(Subject):
    """With every option that works without CUDA."""

    promises = Promises(fsync=False, digest="CRC-32", commit="", software=f"torch {torch.__version__}")

    def open(self) -> None:
        config = CheckpointerConfig(staging_config=CheckpointStagerConfig(**no_cuda_options()))
        self._checkpointer: Any = make_async_checkpointer(config)

    def save(self, step: int) -> Handle:
        futures = self._checkpointer.save(str(self.stored(step)), self.state.state_dict())
        return _Saving(*futures)

    def restore(self, step: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._checkpointer.load(str(self.stored(step)), self.state.state_dict())

    def close(self) -> None:
        self._checkpointer.close()
