"""A rendezvous of torch's, the loss of which ends nothing that runs; and what it means that none came about."""

# torch leaves types open
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler

from ckptd.errors import CkptdError, RendezvousLost, first_line

log = logging.getLogger("ckptd.run")


def unmet(error: Exception, saved: str = "") -> CkptdError:
    """What it means that nodes have not met. ``saved``: what has become of that which the start before had sealed,
    where there was one."""
    why = error.message if isinstance(error, CkptdError) else first_line(error)
    if saved:
        return RendezvousLost(
            f"the nodes cannot meet any more: {why}; {saved}",
            hint="start it again on all nodes, and it goes on from the newest checkpoint",
        )
    return CkptdError(
        f"no start with the other nodes came about: {why}",
        hint="the launch has ended on another node, whose launcher says why, or the rendezvous' host is not up",
    )


class Lasting:
    """As the handler itself, but that nobody waits to join where its store is gone: workers need it to come together,
    and not to go on."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def num_nodes_waiting(self) -> int:
        """As :meth:`RendezvousHandler.num_nodes_waiting`, but never raises for a store that is gone."""
        if self._lost:
            return 0
        try:
            waiting: int = self._handler.num_nodes_waiting()
        except RendezvousConnectionError:
            self._lost = True
            log.warning("the store of the rendezvous is gone: what runs goes on, but no further start can come about")
            return 0
        return waiting
