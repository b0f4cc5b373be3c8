"""``torch.distributed.checkpoint.save``, of one process, and what all subjects of that library share."""

from __future__ import annotations

import os
import warnings
from typing import Any, cast

import torch
from torch import distributed
from torch.distributed import checkpoint

from bench.subject import Done, Handle, Promises, Subject

dcp = cast(Any, checkpoint)  # whose own types are incomplete
_dist = cast(Any, distributed)
_ONE_PROCESS = "torch.distributed is disabled"


class Dcp(Subject):
    """Restores into the live tensors, where they lie."""

    promises = Promises(fsync=True, digest="CRC-32", commit="metadata file", software=f"torch {torch.__version__}")

    def restore(self, step: int) -> None:
        state = self.state.state_dict()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ONE_PROCESS)
            dcp.load(state, checkpoint_id=self.stored(step))


class DcpSave(Dcp):
    """The training waits."""

    def save(self, step: int) -> Handle:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ONE_PROCESS)
            dcp.save(self.state.state_dict(), checkpoint_id=self.stored(step))
        return Done()


def join_process_group() -> None:
    """A group of one: the asynchronous ways of this library want it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "USE_LIBUV": "0"}
    _dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)


def leave_process_group() -> None:
    """The reverse."""
    _dist.destroy_process_group()


def no_cuda_options() -> dict[str, Any]:
    """Every staging option that works without CUDA: a kept buffer in shared memory, and a copy in a thread."""
    return {
        "use_pinned_memory": False,
        "use_shared_memory": True,
        "use_async_staging": True,
        "use_non_blocking_copy": False,
    }
