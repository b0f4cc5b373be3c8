"""A real daemon for the tests of the client, and a small training to checkpoint."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckptd_client import Checkpointer
from devtools.processes import kill_group, spawn, wait_until

QUICK = ("--retention-grace", "0.2", "--verify-bandwidth", "0")
"""What a test waits for, it does not wait for long; and nothing is found out but what it asks for."""


class Daemon:
    """A daemon process at a socket, to be killed and started again."""

    def __init__(self, folder: Path, *options: str, under: tuple[str, ...] = ()) -> None:
        """``under``: a command that starts it."""
        self._under = under
        self.socket = folder / "daemon.sock"
        self.log = folder.with_suffix(".log")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = spawn(
                [*self._under, sys.executable, "-m", "ckptd.daemon", "--socket", self.socket, *QUICK, *self._options],
                output=log,
            )
        wait_until(self.socket.exists, "the daemon's socket", deadline_seconds=20)

    def kill(self) -> None:
        """SIGKILL, also to one that a client has started in its place."""
        if self._process is not None:
            kill_group(self._process)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.socket) in process.cmdline() and "ckptd.daemon" in process.cmdline():
                    process.kill()
        self.socket.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def daemon(private_folders: Path) -> Iterator[Daemon]:
    """The daemon that most tests share."""
    found = Daemon(private_folders / "shared")
    found.start()
    yield found
    found.kill()


@pytest.fixture
def own_daemon(private_folders: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons for one test, with options of its own."""
    started: list[Daemon] = []

    def start(*options: str) -> Daemon:
        folder = private_folders / f"own-{abs(hash(request.node.nodeid)) % 10**8}-{len(started)}"
        found = Daemon(folder, *options)
        found.start()
        started.append(found)
        return found

    yield start
    for found in started:
        found.kill()


class Training:
    """A model that trains on random numbers. Every step changes every parameter."""

    def __init__(self, *, width: int = 64, layers: int = 3, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.width = width
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self) -> float:
        """One training step."""
        loss = self.model(torch.randn(8, self.width)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def open_ckpt(daemon: Daemon, tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Opens checkpointers at the shared daemon; closes what the test left open, before its folder is removed."""
    opened: list[Checkpointer] = []

    def start(url: str, state: dict[str, Any], **options: Any) -> Checkpointer:
        options.setdefault("socket", daemon.socket)
        ckpt = Checkpointer(url, state, **options)
        opened.append(ckpt)
        return ckpt

    yield start
    for ckpt in opened:
        ckpt.close()


def committed(url: str) -> list[int]:
    """Steps that have a manifest."""
    return sorted(int(path.name[:12]) for path in Path(url.removeprefix("file://")).glob("manifests/*.json"))
