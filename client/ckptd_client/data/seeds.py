"""Random numbers that follow from what is asked for, and from nothing else."""

# torch leaves types open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch
from torch.utils.data import get_worker_info


def mixed(*numbers: int | str) -> int:
    """63 well-mixed bits that follow from the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_worker(seed: int) -> None:
    """Seed the global generators for one sample, in a worker process only: the trainer's own are part of its state."""
    if get_worker_info() is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
