"""What a run of the benchmark is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp32", "bf16"]

MB = 1_000_000
ATTEMPTS = 3
"""Saves in a turn, of those asked for, at most."""
FOREIGN_CORES_MAX = 0.3
"""What other programs may use while a save counts as undisturbed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for all subjects of a run."""

    state_bytes: int = 512 * MB
    tensors: int | None = None
    """Of the whole state, all of one size; ``None``: shaped like a GPT."""
    dtype: Dtype = "fp32"
    """Of the model's parameters; see :mod:`bench.state`."""
    rounds: int = 2
    """How often each subject has its turn."""
    saves: int = 3
    """Measured in each turn, after the warm-up; up to three times as many where other programs disturb."""
    warm_ups: int = 2
    """Saves in each turn, after the first, that are not counted."""
    restores: int = 2
    """In each turn, cold, and as many warm."""
    patience_seconds: float = 30.0
    """How long a turn waits at most for other programs to become quiet."""
    step_seconds: float = 0.3
    """Of computation in a training step, beside the optimizer's."""

    window_steps: int = 4
    """So many steps a window has at least."""
    turn_seconds: float = 900.0
    """A turn that takes longer has failed."""
    label: str = ""
    """Behind the name of the results, where a state is measured in more than one way."""

    @property
    def name(self) -> str:
        """For the files of the results."""
        shape = "gpt" if self.tensors is None else f"{self.tensors}-tensors"
        parts = [f"{self.state_bytes // MB}mb", shape, self.dtype if self.dtype != "fp32" else "", self.label]
        return "-".join(part for part in parts if part)
