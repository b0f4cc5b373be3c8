"""What a training loop imports: asynchronous checkpoints of its whole state.

The entry is :class:`Checkpointer`; :func:`open_checkpoint` reads without a run.
"""

from ckptd.checkpoint.keep import Keep
from ckptd.pulse.loss_rules import LossRules
from ckptd_client.capture import FlatPartition, FlatSlice, register_codec
from ckptd_client.checkpointer import Checkpointer
from ckptd_client.data import PerRank, Reshapes, ResumableLoader, ResumableStream
from ckptd_client.reader import open_checkpoint
from ckptd_client.restored import Restored
from ckptd_client.save import Save
from ckptd_client.stopping import Stopped
from ckptd_client.tiers import Tier

__all__ = [
    "Checkpointer",
    "FlatPartition",
    "FlatSlice",
    "Keep",
    "LossRules",
    "PerRank",
    "Reshapes",
    "Restored",
    "ResumableLoader",
    "ResumableStream",
    "Save",
    "Stopped",
    "Tier",
    "open_checkpoint",
    "register_codec",
]
