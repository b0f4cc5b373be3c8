"""The floor: a bare copy into kept shared memory, and a direct write from it. No format, digest or commit."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bench.disk import read_direct, write_direct
from bench.state import Replica
from bench.subject import Handle, Promises, Subject


class _Writing(Handle):
    def __init__(self, copied: Future[None] | None, written: Future[None]) -> None:
        self._copied = copied
        self._written = written

    def wait_copied(self) -> None:
        if self._copied is not None:
            self._copied.result()

    def wait_durable(self) -> None:
        self._written.result()


class Eager(Subject):
    """The call copies."""

    promises = Promises(fsync=True, digest="", commit="", software=f"torch {torch.__version__}")
    restores_from_memory = True

    def open(self) -> None:
        self.replica = Replica(self.state)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bench-write")
        self._kept = False

    def save(self, step: int) -> Handle:
        self.replica.take()
        return _Writing(None, self._thread.submit(self._write, step))

    def _write(self, step: int) -> None:
        write_direct(self.stored(step), self.replica.memory)

    def restart(self, *, keep_memory: bool) -> None:
        self._kept = keep_memory

    def restore(self, step: int) -> None:
        if not self._kept:
            read_direct(self.stored(step), self.replica.memory)
        names = self.state.tensors()
        self.state.load_tensors(dict(zip(names, self.replica.targets, strict=True)))

    def close(self) -> None:
        self._thread.shutdown()


class Overlapped(Eager):
    """A thread copies, without the interpreter's lock, until the next optimizer step."""

    def save(self, step: int) -> Handle:
        copied: Future[None] = Future()
        return _Writing(copied, self._thread.submit(self._copy_and_write, copied, step))

    def _copy_and_write(self, copied: Future[None], step: int) -> None:
        self.replica.take()
        copied.set_result(None)
        self._write(step)
