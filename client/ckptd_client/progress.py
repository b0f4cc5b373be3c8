"""What the training thread reports, step by step: a beat at once, and a row of the training log as soon as all of its
figures are there."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckptd.format.metrics import as_number
from ckptd.limits import LATE_ROWS_MAX
from ckptd.pulse.pulse import Pulse
from ckptd_client.settings import check_metric

EXACT = 2**53
"""Whole numbers up to here are floating-point numbers too."""
_NAN = math.nan


class Late(Protocol):
    """Figures that are still on their way from a device."""

    @property
    def there(self) -> bool:
        """They have arrived."""
        ...

    def numbers(self) -> dict[str, float]:
        """Waits for them."""
        ...


class FromGpu:
    """Tensors of one number each, copied to the host behind all work that was given to the device so far. Neither the
    device nor the training waits for that, unless it asks for the numbers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copies = {name: tensor.detach().to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        self._events: list[torch.cuda.Event] = []
        for device in {tensor.device for tensor in tensors.values()}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    @property
    def there(self) -> bool:
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def numbers(self) -> dict[str, float]:
        """As :meth:`Late.numbers`."""
        for event in self._events:
            event.synchronize()
        return {name: number for name, copy in self._copies.items() if (number := as_number(copy)) is not None}


OnGpu = dict[str, torch.Tensor] | None


def figures(step: int, metrics: dict[str, Any]) -> tuple[dict[str, float], OnGpu]:
    """The numbers among a step's metrics, and the tensors that lie on a GPU, where there are any. Other tensors are
    read; a number that no float can hold is left out. Raises as :func:`check_metric`."""
    for value in metrics.values():
        if type(value) is not float and not (type(value) is int and -EXACT <= value <= EXACT):
            return _of_any_kind(step, metrics)
    return metrics, None


def _of_any_kind(step: int, metrics: Mapping[str, Any]) -> tuple[dict[str, float], OnGpu]:
    values: dict[str, float] = {}
    on_gpu: dict[str, torch.Tensor] = {}
    for name, value in metrics.items():
        check_metric(step, name, value)
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cuda:
            on_gpu[name] = value
        elif (number := as_number(value)) is not None:
            values[name] = number
    return values, on_gpu or None


@dataclass(slots=True)
class _Row:
    step: int
    values: dict[str, float]
    late: Late | None
    unix_seconds: float
    step_seconds: float


class Progress:
    """Of one trainer. Belongs to the training thread."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._rows: deque[_Row] = deque()
        """That wait for a figure, or for one that does."""
        self._last: dict[str, float] = {}
        """The newest figures that are known."""

    def report(self, now_ns: int, step: int, values: dict[str, float], late: Late | None = None) -> None:
        """Beat, and log what is complete. ``now_ns``: when the step was done, by ``CLOCK_MONOTONIC``."""
        if late is None:
            self._last = values
        latest = self._last.get
        unix_seconds = time.time()
        seconds = self._pulse.step_at(now_ns, unix_seconds, step, latest("loss", _NAN), latest("grad_norm", _NAN))
        if late is None and not self._rows:
            self._pulse.log(step, values, unix_seconds, seconds)
            return
        self._rows.append(_Row(step, values, late, unix_seconds, seconds))
        while self._rows and (len(self._rows) > LATE_ROWS_MAX or _is_there(self._rows[0])):
            self._log_one()

    def _log_one(self) -> None:
        row = self._rows.popleft()
        if row.late is not None:
            row.values.update(row.late.numbers())
            self._last = row.values
        self._pulse.log(row.step, row.values, row.unix_seconds, row.step_seconds)

    def close(self) -> None:
        """Log what is still waited for."""
        while self._rows:
            self._log_one()


def _is_there(row: _Row) -> bool:
    return row.late is None or row.late.there
