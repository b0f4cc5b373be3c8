"""Which rank of which world this process is, what its launch is called, and through which store the ranks agree."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckptd.errors import ConfigError
from ckptd.limits import AGREEMENT_SECONDS

LAUNCH_VARIABLE = "CKPTD_LAUNCH_ID"


@dataclass(frozen=True, slots=True)
class Topology:
    """``launch``: what the ranks of one start have in common; empty where nothing says so. A restart count follows
    behind ``#``, so that the restarts of one launcher are known as such."""

    rank: int
    world: int
    launch: str

    @classmethod
    def detect(cls, rank: int | None = None, world: int | None = None, launch: str | None = None) -> Topology:
        """From what is given, else the process group, else the launcher's environment, else a single process.

        Raises :class:`ConfigError` where these contradict each other.
        """
        if rank is None or world is None:
            rank, world = _from_surroundings()
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} of a world of {world}")
        launch = launch or os.environ.get(LAUNCH_VARIABLE) or _launcher_id()
        if not launch and world == 1:
            launch = uuid.uuid4().hex
        return cls(rank, world, launch)


def _from_surroundings() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def _launcher_id() -> str:
    environ = os.environ
    if environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"{environ['TORCHELASTIC_RUN_ID']}#{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "SLURM_JOB_ID" in environ:
        attempt = f"{environ.get('SLURM_RESTART_COUNT', '0')}.{environ.get('SLURM_STEP_ID', '0')}"  # a step is one srun
        return f"slurm-{environ['SLURM_JOB_ID']}#{attempt}"
    return ""


def node_id(socket: Path) -> str:
    """Which node this process is on: the same for all that share a daemon, in whichever container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    info = socket.stat()
    return f"{boot}.{info.st_dev}.{info.st_ino}"


def number_nodes(ids: list[str]) -> list[int]:
    """For each rank the number of its node, in the order in which they first appear."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(ids))}
    return [numbers[name] for name in ids]


def torch_store() -> Any | None:
    """The store of the process group, else torchrun's, else ``None``. A ``torch.distributed.Store``."""
    if not dist.is_available():
        return None
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    environ = os.environ
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in environ:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        store = TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=AGREEMENT_SECONDS),
        )
        # It outlives the ranks: what they left before a restart is none of this start's.
        return PrefixStore(f"ckptd-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return None
