"""What a trainer shows of itself while it lives: a page with its progress, and levers that work when it does not.

Both are descriptors that the trainer makes and hands to the daemon, so neither depends on process numbers, namespaces
or users that the two have in common.
"""

from ckptd.pulse.levers import Levers
from ckptd.pulse.page import Beat, Phase, StatusPage
from ckptd.pulse.pulse import Pulse

__all__ = ["Beat", "Levers", "Phase", "Pulse", "StatusPage"]
