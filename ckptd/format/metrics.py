"""What training reports, as a record can keep it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def metrics_for_record(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers as a record keeps them. ``None`` for what JSON cannot hold (nan, infinity) and for what is no number: a
    metric never makes a save fail."""
    numbers = {name: as_number(value) for name, value in metrics.items()}
    return {name: number if number is not None and math.isfinite(number) else None for name, number in numbers.items()}


def as_number(value: Any) -> float | None:
    """``None`` for what is no number. A tensor is read, which waits for its device."""
    try:
        # item() reads a tensor that is part of a gradient without torch's warning.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None
