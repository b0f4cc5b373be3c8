"""What the training thread reports, step by step: a beat at once, and a row of the training log as soon as all of its
figures are there."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckptd.format.metrics import as_number, metrics_for_record
from ckptd.limits import LATE_ROWS_MAX, LOG_COLUMNS_MAX, LOG_NAME_BYTES_MAX
from ckptd.pulse.pulse import Pulse

_log = logging.getLogger("ckptd")


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
    device nor the training waits for that."""

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
        return {name: float(copy.item()) for name, copy in self._copies.items()}


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
        self._warned = False

    def step(self, step: int, metrics: Mapping[str, Any], *, due: bool) -> dict[str, float | None]:
        """A step is done. Returns its metrics for a save, where one is ``due``: only then are tensors on a GPU waited
        for. Metrics that are no numbers are left out."""
        values: dict[str, float] = {}
        on_gpu: dict[str, torch.Tensor] = {}
        for name, value in metrics.items():
            if not due and type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_cuda and value.numel() == 1:
                on_gpu[name] = value
            elif (number := as_number(value)) is not None:
                values[name] = number
        self.report(step, values, FromGpu(on_gpu) if on_gpu else None)
        return metrics_for_record({name: values.get(name) for name in metrics}) if due else {}

    def report(self, step: int, values: dict[str, float], late: Late | None = None) -> None:
        """Beat, and log what is complete."""
        if late is None:
            self._last = values
        loss, norm = self._last.get("loss", math.nan), self._last.get("grad_norm", math.nan)
        seconds = self._pulse.step(step, loss, norm)
        self._rows.append(_Row(step, values, late, time.time(), seconds))
        while self._rows and (len(self._rows) > LATE_ROWS_MAX or _is_there(self._rows[0])):
            self._log_one()

    def _log_one(self) -> None:
        row = self._rows.popleft()
        if row.late is not None:
            row.values.update(row.late.numbers())
            self._last = row.values
        self._pulse.log(row.step, row.values, unix_seconds=row.unix_seconds, step_seconds=row.step_seconds)
        if self._pulse.columns_refused and not self._warned:
            self._warned = True
            _log.warning(
                "the training log has room for %d names of at most %d bytes; others are dropped",
                LOG_COLUMNS_MAX,
                LOG_NAME_BYTES_MAX,
            )

    def close(self) -> None:
        """Log what is still waited for."""
        while self._rows:
            self._log_one()


def _is_there(row: _Row) -> bool:
    return row.late is None or row.late.there
