"""Who fills an arena: a process that is one rank of a run, and whether it is still alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.checkpoint.trial import Loader
from ckptd.daemon.tier import Exchange, Tier
from ckptd.errors import UsageError
from ckptd.pulse.loss_rules import LossRules, OnBadLoss
from ckptd.storage import Backend
from ckptd.wire.messages import Outgoing, TierOfRun


class Seat(NamedTuple):
    """One rank of one run. At most one living owner at a time."""

    url: str
    """The run's nearest root."""
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.url}"


class PeerProcess:
    """A process, held by a pidfd: its number cannot be reused for another under our eyes."""

    def __init__(self, pid: int, died: Callable[[], None]) -> None:
        """``pid`` 0: it lives where we cannot see it, and only its socket tells. ``died`` is called once, on the
        running event loop."""
        self.pid = pid
        self._died = died
        self._fd = -1
        self._gone = False
        if pid:
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError as error:  # out of descriptors
                raise UsageError(f"cannot watch process {pid}: {error.strerror}") from None
            else:
                asyncio.get_running_loop().add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        self.close()
        self._gone = True
        self._died()

    @property
    def alive(self) -> bool | None:
        """``None``: cannot be seen."""
        if not self.pid:
            return None
        if self._fd >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return not poll.poll(0)
        return not self._gone

    def kill(self) -> None:
        """SIGKILL, where it can be seen and this user may."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


@dataclass(eq=False, kw_only=True)
class Owner:
    """A trainer process in its seat."""

    seat: Seat
    world: int
    launch: str
    tiers: tuple[Tier, ...]
    """Nearest first."""
    process: PeerProcess = field(repr=False)
    loader: Loader | None = None
    """What really loads a checkpoint of this run, for a trial."""
    load_every: int = 1
    """Of so many commits, one is loaded."""
    incremental: bool = True
    """What is unchanged since an older checkpoint is referred to and not stored again."""
    on_bad_loss: OnBadLoss = "nothing"
    loss_rules: LossRules = field(default_factory=LossRules, repr=False)
    send: Callable[[Outgoing], None] = field(repr=False)
    asked_tiers: tuple[TierOfRun, ...] = field(default=(), repr=False)
    """As it named them, to be opened again when it is gone. Secrets may be in here."""
    connected: bool = True
    hung_up: bool = False
    """The connection was ended by its side."""

    @property
    def nearest(self) -> Tier:
        """Where saves go, and are committed first."""
        return self.tiers[0]

    @property
    def backends(self) -> tuple[Backend, ...]:
        """All that are in use for this trainer."""
        return tuple(backend for tier in self.tiers for backend in (tier.backend, tier.reading, tier.verifying))

    @property
    def home(self) -> Tier:
        """The nearest tier that all ranks see."""
        return next((tier for tier in self.tiers if tier.shared), self.tiers[-1])

    def exchange(self, tier: Tier) -> Exchange | None:
        """Where the nodes tell each other of a tier that none of them sees but for its own part of it."""
        return None if tier.shared or self.home is tier else Exchange(self.home.backend, tier.number)

    @property
    def dead(self) -> bool:
        """Proven: the process has ended; or, where it cannot be seen, its end of the socket is closed."""
        alive = self.process.alive
        return self.hung_up if alive is None else not alive

    def same_process(self, other: Owner) -> bool:
        """Whether both are one process, which has come back."""
        return self.process.pid > 0 and self.process.pid == other.process.pid and not other.dead

    def post(self, event: Outgoing) -> None:
        """Send an event, if there is still anybody to hear it."""
        if self.connected:
            self.send(event)

    def __str__(self) -> str:
        return f"process {self.process.pid or 'in another namespace'} of launch {self.launch}"
