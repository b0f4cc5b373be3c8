"""What an operator can set for a daemon. Every value has a unit and a default."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckptd.daemon.budgets import Budgets
from ckptd.daemon.watch.rules import WatchRules
from ckptd.limits import (
    COMMIT_SECONDS,
    COMMIT_TAKEOVER_SECONDS,
    HEALTH_SECONDS,
    LOG_WRITE_SECONDS,
    RETENTION_GRACE_SECONDS,
    VERIFY_DELAY_SECONDS,
)
from ckptd.wire.channel import default_socket


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Fixed for the life of a daemon."""

    socket: Path = field(default_factory=default_socket)
    allowed_uids: frozenset[int] = frozenset()
    """Users besides this one and root whose trainers may connect. With any, the socket's folder can be passed through
    by everybody, and the kernel's word on the peer's uid decides."""
    budgets: Budgets = field(default_factory=Budgets)
    """What it may take of the machine."""
    idle_exit_seconds: float | None = None
    """End after so long without clients and without work; ``None``: never."""
    drain_seconds: float = 300.0
    """How long SIGTERM waits for what is in flight."""
    commit_seconds: float = COMMIT_SECONDS
    """How long a commit waits for the receipts of other ranks."""
    commit_takeover_seconds: float = COMMIT_TAKEOVER_SECONDS
    """How long other ranks' daemons leave a commit to rank 0's; up to twice that, at random."""
    retention_grace_seconds: float = RETENTION_GRACE_SECONDS
    """Between the announcement of a deletion and the deletion."""
    verify_delay_seconds: float = VERIFY_DELAY_SECONDS
    """After a commit, before it is read again."""
    log_write_seconds: float = LOG_WRITE_SECONDS
    """How long rows of a training log wait at most before they are stored."""
    watch: WatchRules = field(default_factory=WatchRules)
    """What counts as a hang, and what is done about one."""
    health_seconds: float = HEALTH_SECONDS
    """How often the machine and its GPUs are looked at; 0: never."""
    metrics_address: str | None = None
    """Host and port of the web server for metrics and probes; ``None``: there is none."""
    webhook: str | None = field(default=None, repr=False)
    """A URL for alerts. It may hold a token: never logged."""
    log_file: Path | None = None
    """``None``: to standard error."""
    state_dir: Path | None = None
    """A private folder for journals. ``None``: ``state`` beside the socket."""

    @property
    def state_path(self) -> Path:
        """Where the journals are."""
        return self.state_dir if self.state_dir is not None else self.socket.parent / "state"

    @property
    def folder_mode(self) -> int:
        """Permissions of the socket's folder."""
        return 0o711 if self.allowed_uids else 0o700
