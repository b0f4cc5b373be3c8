"""How often and how long a request is tried again; one rule for whole operations and for the parts of large ones."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptd.errors import CkptdError, first_line
from ckptd.jitter import jittered_seconds

T = TypeVar("T")
log = logging.getLogger("ckptd.storage")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter, so that many ranks do not come back together."""

    attempts_max: int = 8
    deadline_seconds: float = 300.0
    """No attempt begins later than this after the first began. What one attempt may take is the backend's to bound."""
    delay_seconds: float = 0.25
    """The second attempt follows after 0 to this long; the range doubles with every attempt."""
    delay_seconds_max: float = 20.0

    def longest_delay_seconds(self, number: int) -> float:
        """Between attempt ``number``, counted from 1, and the next."""
        return min(self.delay_seconds_max, self.delay_seconds * 2.0 ** min(number - 1, 64))


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, CkptdError) and error.retryable


async def retried(
    policy: RetryPolicy,
    what: str,
    call: Callable[[int], Awaitable[T]],
    *,
    retry_on: Callable[[BaseException], bool] = is_retryable,
) -> T:
    """``await call(attempt)``, attempts counted from 1, until it returns, fails for good, or the policy's limits are
    reached; then its last error is raised.

    Written out rather than by a retry library: those keep the last error in the state of the loop, and an error holds
    on to the memory that was being sent.
    """
    began = time.monotonic()
    for number in itertools.count(1):
        try:
            return await call(number)
        except Exception as error:
            delay = jittered_seconds(policy.longest_delay_seconds(number))
            late = time.monotonic() + delay > began + policy.deadline_seconds
            if not retry_on(error) or number >= policy.attempts_max or late:
                raise
            log.warning("%s: attempt %d failed, next in %.1f s: %s", what, number, delay, first_line(error))
        await asyncio.sleep(delay)
    raise AssertionError("unreachable: there is always a next number")
