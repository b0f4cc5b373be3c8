"""Gradient scalers, captured without waiting for the device: scale and growth tracker are read as the tensors they are.

Their own ``state_dict()`` calls ``item()`` on both, which holds the save until the device has caught up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.amp.grad_scaler import GradScaler

from ckptd.format.names import join
from ckptd.format.tree import Path
from ckptd_client.capture.walk import Source, Walk

if TYPE_CHECKING:
    from ckptd_client.capture.restore import Restoring

_TENSORS = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
"""Name in the state → attribute; ``None`` until the scaler is first used."""
_NUMBERS = {
    "growth_factor": "_growth_factor",
    "backoff_factor": "_backoff_factor",
    "growth_interval": "_growth_interval",
}
_INITIAL = {"scale": "_init_scale", "_growth_tracker": "_init_growth_tracker"}


class ScalerSource(Source):
    """A :class:`torch.amp.GradScaler`."""

    def __init__(self, scaler: GradScaler, path: Path) -> None:
        self.scaler = scaler
        self._path = path

    def _state(self) -> dict[str, Any]:
        scaler = self.scaler
        if not scaler.is_enabled():
            return {}
        state = {name: getattr(scaler, attribute) for name, attribute in (_TENSORS | _NUMBERS).items()}
        for name, attribute in _INITIAL.items():
            if state[name] is None:
                state[name] = getattr(scaler, attribute)
        return state

    def walk(self, walk: Walk) -> Any:
        return walk.value(self._state(), self._path)

    def prepare(self, saved: object, restoring: Restoring) -> None:
        where = join(self._path)
        if not restoring.takes(where):
            return
        live = self._state()
        found = cast("dict[str, object]", saved) if isinstance(saved, dict) else {}
        if bool(live) != bool(found):
            on, off = ("here", "in the checkpoint") if live else ("in the checkpoint", "here")
            restoring.mismatch(where, f"the scaler is enabled {on} and not {off}")
            return
        if live and set(restoring.common(live, found, self._path)) == set(live):
            restoring.make(where, found, self._set, torch.device(cast(Any, self.scaler)._device))
        restoring.loaded.append(where)

    def _set(self, value: object) -> None:
        """Take a whole state. Tensors come back as tensors, so that the next capture is the same."""
        state = cast("dict[str, Any]", value)
        for name, attribute in _NUMBERS.items():
            setattr(self.scaler, attribute, state[name])
        for name, attribute in _TENSORS.items():
            live: torch.Tensor | None = getattr(self.scaler, attribute)
            if live is None or not isinstance(state[name], torch.Tensor):
                setattr(self.scaler, attribute, state[name] if isinstance(state[name], torch.Tensor) else None)
            else:
                live.copy_(state[name])
            if not isinstance(state[name], torch.Tensor):
                setattr(self.scaler, _INITIAL[name], state[name])


def is_scaler(value: object) -> bool:
    """Whether the value is torch's scaler, without a state dict of its own making."""
    return (
        isinstance(value, GradScaler)
        and type(value).state_dict is GradScaler.state_dict
        and type(value).load_state_dict is GradScaler.load_state_dict
    )
