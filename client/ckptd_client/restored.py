"""What a caller wants restored, and what a restore did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptd.checkpoint.selectors import Selector
from ckptd.format.keys import Version
from ckptd_client.capture import Report
from ckptd_client.capture.selection import EVERYTHING, NOTHING, Selection
from ckptd_client.capture.stored import Amount

Source = Literal["memory", "storage", "none"]

EMPTY_REPORT = Report((), (), (), (), ())


@dataclass(slots=True)
class Restored:
    """What a restore did."""

    step: int = 0
    """The step that was restored; 0 where nothing was found."""
    source: Source = "none"
    generation: int = 0
    """The generation in which this start goes on; 0 until one was opened."""
    version: Version | None = None
    """The checkpoint that was restored."""
    decision: str = "there is no checkpoint"
    """What all ranks agreed on, and why: the step, where each rank has it from, and what was passed over."""
    report: Report = EMPTY_REPORT
    """What was loaded, missing, unexpected, skipped and why; newer checkpoints that did not verify are notices."""
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    """The checkpoint's whole state tree as plain values, with a reference where it has a tensor."""
    tier: str = ""
    """The URL of the tier that this rank has read; empty where it came from memory."""
    amount: Amount = field(default_factory=Amount)
    """What this rank has read of it, and how much of that it needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller wants restored, and how."""

    step: Selector = "latest"
    required: bool = False
    strict: bool = True
    selection: Selection = EVERYTHING
    cast: Selection = NOTHING

    @property
    def words(self) -> str:
        """That in which all ranks must wish for the same."""
        return f"restore(step={self.step!r}, required={self.required}, strict={self.strict})"
