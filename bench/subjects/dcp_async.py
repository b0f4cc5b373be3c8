"""``torch.distributed.checkpoint.async_save``: by default, with a kept stager, and in a process with every option."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from bench.subject import Handle
from bench.subjects.dcp_save import Dcp, dcp, join_process_group, leave_process_group, no_cuda_options


class _Saving(Handle):
    def __init__(self, response: Future[Any] | AsyncSaveResponse) -> None:
        if isinstance(response, AsyncSaveResponse):
            self._copied: Future[Any] | None = response.staging_completion
            self._written: Future[Any] = response.upload_completion
        else:
            self._copied, self._written = None, response

    def wait_copied(self) -> None:
        if self._copied is not None:
            self._copied.result()

    def wait_durable(self) -> None:
        self._written.result()


class Thread(Dcp):
    """As it comes: a fresh copy for each save, and a thread that writes it."""

    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def open(self) -> None:
        join_process_group()

    def save(self, step: int) -> Handle:
        return _Saving(
            dcp.async_save(
                self.state.state_dict(),
                checkpoint_id=self.stored(step),
                async_checkpointer_type=self.kind,
                async_stager=self.stager,
            )
        )

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()
        leave_process_group()


class ThreadKeptStager(Thread):
    """One stager for all saves, which keeps its buffers."""

    def open(self) -> None:
        super().open()
        self.stager = DefaultStager(StagingOptions(False, False, False, False))


class Process(Thread):
    """A process that writes, for the rest as it comes."""

    kind = AsyncCheckpointerType.PROCESS


class ProcessAllOptions(Process):
    """A process that writes, kept buffers that it shares, and a copy that overlaps the training."""

    def open(self) -> None:
        super().open()
        self.stager = DefaultStager(StagingOptions(**no_cuda_options()))
