"""NVIDIA's resiliency extension: the asynchronous writer of DCP's format, in a fork of the trainer or a kept process.

It is made for CUDA, and asks it to finish its work at each save; without CUDA that is left out here.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

import torch

from bench.subject import Handle, Promises
from bench.subjects.dcp_save import Dcp, join_process_group, leave_process_group

_package = "nvidia_resiliency_ext.checkpointing.async_ckpt"
_core: Any = import_module(f"{_package}.core")
_writer: Any = import_module(f"{_package}.filesystem_async")
_saver: Any = import_module(f"{_package}.state_dict_saver")

_software = f"nvidia-resiliency-ext {version('nvidia-resiliency-ext')}"
_promised = Promises(
    fsync=True, digest="CRC-32", commit="metadata file", software=f"{_software}, torch.cuda.synchronize left out"
)


class _Saving(Handle):
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def wait_copied(self) -> None:
        pass  # nothing says when: the call has made sure

    def wait_durable(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)


class Forked(Dcp):
    """A fork of the trainer writes what it sees: the copy is the kernel's, page by page, as the trainer goes on."""

    promises = _promised
    persistent = False

    def open(self) -> None:
        if not torch.cuda.is_available():
            cast(Any, torch.cuda).synchronize = lambda: None
        join_process_group()
        self._queue: Any = _core.AsyncCallsQueue(persistent=self.persistent)

    def save(self, step: int) -> Handle:
        self.stored(step).mkdir()
        writer = _writer.FileSystemWriterAsync(self.stored(step), thread_count=1)
        planned = _saver.save_state_dict_async_plan(self.state.state_dict(), writer)
        function, _, arguments = writer.get_save_function_and_args()
        preload = partial(writer.preload_tensors, writer.write_buckets, torch.cuda.is_available())
        finish = partial(_saver.save_state_dict_async_finalize, *planned)
        request = _core.AsyncRequest(function, arguments, [finish], preload_fn=preload)
        self._queue.schedule_async_request(request)
        return _Saving(self._queue)

    def close(self) -> None:
        self._queue.close()
        leave_process_group()


class Persistent(Forked):
    """A kept process writes what it is sent."""

    persistent = True
