"""Forks ranks in no time: ``python -m tests.ranks.nursery``; see :mod:`tests.nursery`.

Each has two descriptors, which become its standard input and output.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from tests.nursery import nurse
from tests.ranks import flat, layouts, models, odd, worker

_preloaded = (flat, layouts, models, odd)


def main() -> None:
    """Fork until the other end closes the socket."""
    torch.set_num_threads(1)
    worker.Worker().training.step()  # what an optimizer imports only when it is used first
    nurse(_live)


def _live(_: dict[str, Any], requests: int, answers: int) -> int:
    """A rank, to its end."""
    os.dup2(requests, 0)
    os.dup2(answers, 1)
    os.close(requests)
    os.close(answers)
    random.seed()  # as in processes of their own, no two ranks have the same numbers
    np.random.seed()
    worker.main()
    return 0


if __name__ == "__main__":
    main()
