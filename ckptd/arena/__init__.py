"""The shared memory of one rank: an arena of slots.

One memfd, one descriptor, no name in ``/dev/shm``. The daemon creates it; the trainer writes snapshots into its slots.
It describes itself, so that either side can be replaced while the other lives.
"""

from ckptd.arena.memory import Arena, ArenaShape
from ckptd.arena.slots import SlotRecord, SlotState

__all__ = ["Arena", "ArenaShape", "SlotRecord", "SlotState"]
