"""The handle on one save, from the copy to the commit."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

from ckptd.errors import CkptdError, DeadlineExceeded, SaveError
from ckptd.format.keys import Version
from ckptd.wire.messages import SlotRef

State = Literal["deferred", "filling", "sealed", "durable", "committed", "failed"]
"""``deferred``: asked for inside gradient accumulation, taken at the next boundary. ``failed`` includes skipped."""
Stage = Literal["sealed", "durable", "committed"]

_ORDER: dict[State, int] = {"deferred": 0, "filling": 1, "sealed": 2, "durable": 3, "committed": 4, "failed": 5}


@dataclass(slots=True)
class SaveStats:
    """Where the time of a save went. Fields that are not known yet are 0."""

    bytes: int = 0
    """Of this rank's shard."""
    overlapped_bytes: int = 0
    """How much of it was copied during the next forward and backward."""
    wait_seconds: float = 0.0
    """Waiting for a free slot; part of the stall."""
    stall_seconds: float = 0.0
    """How long the training thread stood still: in ``save`` and in the optimizer's fence."""
    copy_seconds: float = 0.0
    """From the call to the seal."""
    queue_seconds: float = 0.0
    """From the seal (or the first part) until the daemon began to write."""
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    """From durable to committed: waiting for other ranks included."""
    path: str = ""
    """How the bytes went: ``direct``, ``buffered``, ``multipart`` …"""


class Save:
    """One save of one rank. Thread-safe. A save that fails never raises in the training step: ask ``error``."""

    def __init__(self, version: Version, reason: str = "", *, pin: bool = False, debug: bool = False) -> None:
        self.version = version
        self.reason = reason
        self.pin = pin
        self.debug = debug
        self.ref: SlotRef | None = None
        """The slot that was filled for it."""
        self.stats = SaveStats()
        self.not_finite: tuple[str, ...] = ()
        """Tensors that hold a nan or an infinity, where ``check_finite`` was asked for; known once it is sealed."""
        self.started_seconds = time.monotonic()
        self._state: State = "filling"
        self._error: CkptdError | None = None
        self._changed = threading.Condition()

    @property
    def step(self) -> int:
        return self.version.step

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> CkptdError | None:
        """Why it failed; ``None`` unless the state is ``failed``."""
        return self._error

    @property
    def done(self) -> bool:
        """Committed or failed: nothing more will happen."""
        return self._state in ("committed", "failed")

    def wait(self, stage: Stage = "committed", timeout: float | None = None) -> None:
        """Block until the save has reached ``stage``, or beyond. ``timeout`` in seconds.

        Raises the save's own error if it failed, :class:`DeadlineExceeded` when the time is up.
        """
        with self._changed:
            self._await(stage, timeout)
            if self._error is not None:
                raise self._error

    def wait_for_end(self, timeout: float | None) -> None:
        """Block until the save is committed or has failed. Raises :class:`DeadlineExceeded`, and no other error."""
        with self._changed:
            self._await("committed", timeout)

    def _await(self, stage: Stage, timeout: float | None) -> None:
        if not self._changed.wait_for(lambda: _ORDER[self._state] >= _ORDER[stage], timeout):
            raise DeadlineExceeded(f"step {self.step}: still {self._state} after {timeout} s, not {stage}")

    def advance(self, state: State) -> None:
        """Move on; never backwards, and never away from ``failed``."""
        with self._changed:
            if self._state != "failed" and _ORDER[state] > _ORDER[self._state]:
                self._state = state
                self._changed.notify_all()

    def begin(self, step: int) -> None:
        """The copy begins, of the state after ``step``: for a deferred save a later one than was asked for."""
        self.started_seconds = time.monotonic()
        self.version = Version(step, self.version.generation)
        self._state = "filling"

    def defer(self) -> None:
        """Wait for the next boundary; before the copy has begun."""
        self._state = "deferred"

    def fail(self, error: CkptdError) -> None:
        """End it. A committed save cannot fail any more."""
        with self._changed:
            if not self.done:
                self._error = error
                self._state = "failed"
                self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Save step {self.step}, {self._state}{f', {self._error}' if self._error else ''}>"


def as_save_error(error: BaseException) -> SaveError:
    """Whatever went wrong during a save, as the error on its handle. It does not lead to the original, whose traceback
    would hold the slot's memory as long as somebody holds the handle."""
    return error if isinstance(error, SaveError) else SaveError(f"{type(error).__name__}: {error}")
