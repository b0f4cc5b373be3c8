"""Where a restart goes on: not where the user once began, but where the run has got to (R162)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ckptd.checkpoint.selectors import Selector
from ckptd_client.agreement import Agreement
from ckptd_client.blocking import run_blocking
from ckptd_client.nearest import has_own
from ckptd_client.roots import Root

_log = logging.getLogger("ckptd")


def resumed(step: Selector, agreement: Agreement, roots: Sequence[Root], await_idle: Callable[[], None]) -> Selector:
    """What is to be restored by a script that asks for ``step``. The same on all ranks.

    A launcher that starts a script anew starts it with the same arguments, and so with the checkpoint that the user
    began from, or with none. Once an earlier start of the same launch has saved, the newest is meant. ``await_idle``:
    returns when the daemon has committed what it holds.
    """
    if step == "latest" or not _is_restart(roots[0].launch):
        return step
    await_idle()
    if not agreement.decide("resume", None, lambda _: run_blocking(has_own(roots, roots[0].launch))):
        return step
    _log.warning("this is a restart, and the run has got further: restoring its newest checkpoint, not step %s", step)
    return "latest"


def _is_restart(launch: str) -> bool:
    count = launch.rpartition("#")[2].split(".")[0]
    return "#" in launch and count != "0"
