"""The subjects, by the names under which the results list them.

To add one, add a module and a line here. ``python -m bench`` imports a module only in the turn's own process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

from bench.state import TrainingState
from bench.subject import Subject

Factory = Callable[[TrainingState, Path], Subject]

FLOOR = "memcpy"
"""What everything is compared with."""
OVERLAPPED_FLOOR = "memcpy, overlapped"
OURS = "ckptd"
OURS_EAGER = "ckptd, overlap=False"

SUBJECTS = {
    FLOOR: "bench.subjects.memcpy:Eager",
    OVERLAPPED_FLOOR: "bench.subjects.memcpy:Overlapped",
    OURS: "bench.subjects.ckptd:Overlapped",
    OURS_EAGER: "bench.subjects.ckptd:Eager",
    "torch.save": "bench.subjects.torch_save:TorchSave",
    "safetensors": "bench.subjects.safetensors_file:Safetensors",
    "dcp.save": "bench.subjects.dcp_save:DcpSave",
    "dcp.async_save, thread": "bench.subjects.dcp_async:Thread",
    "dcp.async_save, thread, kept stager": "bench.subjects.dcp_async:ThreadKeptStager",
    "dcp.async_save, process, all options": "bench.subjects.dcp_async:Process",
    "dcp experimental": "bench.subjects.dcp_experimental:Experimental",
}
"""Name → module and class."""


def load(name: str) -> Factory:
    """The class of a subject. Raises :class:`ImportError` where its library is not installed."""
    module, _, attribute = SUBJECTS[name].partition(":")
    return cast(Factory, getattr(importlib.import_module(module), attribute))
