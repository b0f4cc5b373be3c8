"""The fence: torch's global optimizer hooks, which tell when the state may change and when it has.

An overlapped copy of parameters and optimizer state is safe until ``optimizer.step()``; the pre-step hook holds the
step until the copy is done. The post-step hook counts steps, which is how a boundary is told from the inside of
gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[[], None]


class Fence:
    """Hooks on the optimizers of one state. ``before`` runs on the training thread as a step begins, ``after`` as it
    ends; neither may raise into the step."""

    def __init__(self, optimizers: Callable[[], Sequence[torch.optim.Optimizer]], before: Hook, after: Hook) -> None:
        self.steps = 0
        """Hooked steps that have ended."""
        self._optimizers = optimizers
        self._known = optimizers()
        self._before = before
        self._after = after
        self._handles = [
            register_optimizer_step_pre_hook(self._on_before),
            register_optimizer_step_post_hook(self._on_after),
        ]

    def _on_before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._before()

    def _on_after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self.steps += 1
            self._after()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """The state is searched for one that has not been seen in it. One that was is held, too, when it has left."""
        if optimizer not in self._known:
            self._known = self._optimizers()
        return optimizer in self._known

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class Boundary:
    """Tells whether the state is between optimizer steps, by what has moved since it was asked last.

    A boundary is where a hooked step has ended, or a gradient scaler has skipped one (its scale was updated). Where
    there is nothing to watch, every call is a boundary.
    """

    def __init__(self, steps: Callable[[], int], scalers: Callable[[], Sequence[Any]], watched: bool) -> None:
        self._steps = steps
        self._scalers = scalers
        self._watched = watched
        self._last: tuple[Any, ...] | None = None

    def crossed(self) -> bool:
        """Whether a step has ended since the previous call. The first call is a boundary."""
        if not self._watched:
            return True
        now = (self._steps(), *map(_scale_version, self._scalers()))
        moved = now != self._last
        self._last = now
        return moved


def _scale_version(scaler: Any) -> int:
    """Grows with each update of the scale: ``update()`` writes it in place, also when it skips a step."""
    scale = getattr(scaler, "_scale", None)
    return scale._version if isinstance(scale, torch.Tensor) else -1
