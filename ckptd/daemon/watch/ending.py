"""Ending trainers, whatever they are doing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ckptd.daemon.watch.watched import Watched

log = logging.getLogger(__name__)

END_SECONDS = 10.0
"""How long the end of a trainer may take before people are told that it does not end."""
LOOK_SECONDS = 0.1


async def end(ending: Sequence[Watched], why: str) -> list[Watched]:
    """SIGKILL to each, by the lever that it has handed in, and where it can be seen. Returns after
    :data:`END_SECONDS`, or when all have ended; those that have not."""
    for watched in ending:
        log.warning("ending the trainer of %s: %s", watched.owner.seat, why)
        watched.pull("end")
        watched.owner.process.kill()
    for _ in range(int(END_SECONDS / LOOK_SECONDS)):
        if not any(watched.owner.connected for watched in ending):
            break
        await asyncio.sleep(LOOK_SECONDS)
    return [watched for watched in ending if watched.owner.connected]
