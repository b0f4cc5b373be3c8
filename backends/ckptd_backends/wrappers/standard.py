"""The wrappers that production uses, in the order that makes sense."""

from __future__ import annotations

from ckptd.storage import Backend, Limits
from ckptd_backends.wrappers.limited import Limited
from ckptd_backends.wrappers.retrying import Retrying
from ckptd_backends.wrappers.traced import Traced


def standard(backend: Backend, limits: Limits) -> Backend:
    """Entry point. Every attempt of a retried operation is traced and pays for its bytes."""
    limited = Limited(
        Traced(backend),
        operations_max=limits.operations_max,
        up=limits.up,
        down=limits.down,
    )
    return Retrying(limited)
