"""A rate that several share: whoever moves bytes pays for them in time, before they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ckptd.errors import ConfigError


class Pace:
    """A token bucket without a bucket: idle time earns nothing. For the tasks of one event loop.

    However many pay, and however large their payments, in any span of time go at most ``bytes_per_second`` times its
    length, and one payment more.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises :class:`ConfigError` for a rate that lets nothing pass."""
        if not bytes_per_second > 0:
            raise ConfigError("a bandwidth limit must be above zero", hint="leave it out for no limit")
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0

    async def pay(self, size: int) -> None:
        """Wait until ``size`` bytes are paid for; callers are served in the order in which they come."""
        due = self._free_at = max(self._free_at, self._clock()) + size / self.bytes_per_second
        await self._sleep(due - self._clock())
