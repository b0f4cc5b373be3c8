"""``torch_checkpointing.CheckpointManager``: a copy that overlaps the training, and a process that writes."""

from __future__ import annotations

from concurrent.futures import Future
from importlib import import_module
from importlib.metadata import version
from typing import Any

from bench.subject import Handle, Promises, Subject

_library: Any = import_module("torch_checkpointing")
_storage: Any = import_module("torch_checkpointing.storage.filesystem")
_ITEM = "state"


class _Saving(Handle):
    def __init__(self, manager: Any, written: Future[Any]) -> None:
        self._manager = manager
        self._written = written

    def wait_copied(self) -> None:
        with self._manager.lock():
            pass  # as its users do around the optimizer's step

    def wait_durable(self) -> None:
        self._written.result()


class Manager(Subject):
    """As it comes, which is with every option that works without CUDA; :class:`Buffered` where direct writes fail."""

    promises = Promises(
        fsync=False,
        digest="",
        commit="folder's rename",
        software=f"torch_checkpointing {version('torch_checkpointing')}",
    )
    direct = True

    def open(self) -> None:
        storage = _storage.LocalFileSystemStorageConfig(use_direct_io=self.direct)
        self._manager = _library.CheckpointManager.Config(storage_config=storage).build()

    def save(self, step: int) -> Handle:
        return _Saving(self._manager, self._manager.save(str(self.stored(step)), {_ITEM: self.state.tensors()}))

    def restore(self, step: int) -> None:
        loaded = self._manager.load(str(self.stored(step)), into={_ITEM: self.state.tensors()})
        self.state.take_over(loaded[_ITEM])

    def close(self) -> None:
        self._manager.close()


class Buffered(Manager):
    """Through the page cache."""

    direct = False
