"""Backends around backends: the same interface, one concern each. They compose in any order.

For production: :class:`Retrying` outside, so that it sees whole operations; :class:`Limited` inside it, so that every
attempt pays; :class:`Traced` where one wants to count.
"""

from ckptd_backends.retry import RetryPolicy
from ckptd_backends.wrappers.base import Wrapper
from ckptd_backends.wrappers.faults import Faulty, Slow
from ckptd_backends.wrappers.limited import Limited
from ckptd_backends.wrappers.retrying import Retrying
from ckptd_backends.wrappers.traced import OperationCount, Traced

__all__ = ["Faulty", "Limited", "OperationCount", "RetryPolicy", "Retrying", "Slow", "Traced", "Wrapper"]
