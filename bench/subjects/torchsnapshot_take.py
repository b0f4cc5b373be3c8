"""``torchsnapshot.Snapshot.async_take``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from bench.subject import Handle, Promises, Subject

_library: Any = import_module("torchsnapshot")


class _Saving(Handle):
    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def wait_copied(self) -> None:
        pass  # the call has copied everything

    def wait_durable(self) -> None:
        self._pending.wait()


class Torchsnapshot(Subject):
    """The call copies, threads of the trainer's write. Restores into the live tensors, where they lie."""

    promises = Promises(
        fsync=False, digest="", commit="metadata file", software=f"torchsnapshot {version('torchsnapshot')}"
    )

    def save(self, step: int) -> Handle:
        state = {"state": _library.StateDict(**self.state.tensors())}
        return _Saving(_library.Snapshot.async_take(str(self.stored(step)), state))

    def restore(self, step: int) -> None:
        state = _library.StateDict(**self.state.tensors())
        _library.Snapshot(str(self.stored(step))).restore({"state": state})
        self.state.take_over(state)
