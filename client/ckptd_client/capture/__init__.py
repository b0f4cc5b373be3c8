"""The whole training state: read as it is for a snapshot, checked and applied for a restore. Nothing here does I/O.

What is kept, beyond what is obvious:

- Of a tensor its values, in logical order; strides and devices are those of the live tensor. Tensors of the very same
  memory are stored once and stay tied; views that merely overlap are stored each on its own.
- Modules as their state dict, under names without those of wrappers. Optimizer state under the names of the parameters;
  of parameter groups the saved fields win over what the constructor was given.
- Dicts and lists of the caller stay the same objects and get the saved contents. Tensors, arrays, generators and
  objects with a state of their own are updated in place, wherever they are in dicts, lists and tuples.
- Of any other value what :func:`register_codec` or a built-in codec makes of it; else it is refused by its path.
"""

from __future__ import annotations

from ckptd_client.capture.codecs import SavedTensor, register_codec
from ckptd_client.capture.flat import FlatPartition, FlatSlice
from ckptd_client.capture.holdings import Declared
from ckptd_client.capture.leaves import Leaf, Structure
from ckptd_client.capture.parts import Part
from ckptd_client.capture.restore import Report
from ckptd_client.capture.shares import Placement
from ckptd_client.capture.state import Capture, Prepared, State

__all__ = [
    "Capture",
    "Declared",
    "FlatPartition",
    "FlatSlice",
    "Leaf",
    "Part",
    "Placement",
    "Prepared",
    "Report",
    "SavedTensor",
    "State",
    "Structure",
    "register_codec",
]
