"""The subjects, by the names under which the results list them.

To add one, add a module and a line here. ``python -m bench`` imports a module only in the turn's own process, which
for a peer with an environment of its own is that one's interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

from bench.state import TrainingState
from bench.subject import Subject

Factory = Callable[[TrainingState, Path], Subject]


class Entry(NamedTuple):
    """Where a subject is to be found."""

    place: str
    """Module in this package, and class."""
    environment: str | None = None
    """In :mod:`bench.environments`; ``None``: the one that runs the benchmark."""


FLOOR = "memcpy"
"""What everything is compared with."""
OVERLAPPED_FLOOR = "memcpy, overlapped"
OURS = "ckptd"
OURS_EAGER = "ckptd, overlap=False"

SUBJECTS = {
    FLOOR: Entry("memcpy:Eager"),
    OVERLAPPED_FLOOR: Entry("memcpy:Overlapped"),
    OURS: Entry("ckptd:Overlapped"),
    OURS_EAGER: Entry("ckptd:Eager"),
    "torch.save": Entry("torch_save:TorchSave"),
    "safetensors": Entry("safetensors_file:Safetensors"),
    "dcp.save": Entry("dcp_save:DcpSave"),
    "dcp.async_save, thread": Entry("dcp_async:Thread"),
    "dcp.async_save, thread, kept stager": Entry("dcp_async:ThreadKeptStager"),
    "dcp.async_save, process": Entry("dcp_async:Process"),
    "dcp.async_save, process, all options": Entry("dcp_async:ProcessAllOptions"),
    "dcp experimental": Entry("dcp_experimental:Experimental"),
    "torch_checkpointing": Entry("torch_checkpointing_manager:Manager", "torch-checkpointing"),
    "torch_checkpointing, buffered": Entry("torch_checkpointing_manager:Buffered", "torch-checkpointing"),
    "torchsnapshot": Entry("torchsnapshot_take:Torchsnapshot", "torchsnapshot"),
    "dlrover flash": Entry("dlrover_flash:Flash", "dlrover"),
    "nvrx async, fork": Entry("nvrx_async:Forked", "nvrx"),
    "nvrx async, kept process": Entry("nvrx_async:Persistent", "nvrx"),
    "orbax": Entry("orbax_async:Orbax", "orbax"),
    "orbax, no compression": Entry("orbax_async:Uncompressed", "orbax"),
}


def load(name: str) -> Factory:
    """The class of a subject. Raises :class:`ImportError` where its library is not installed."""
    module, _, attribute = SUBJECTS[name].place.partition(":")
    return cast(Factory, getattr(importlib.import_module(f"bench.subjects.{module}"), attribute))
