"""``ckptd run`` as a process, with a daemon of the test's own, and what it and its workers have told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.processes import wait_until
from tests.client.conftest import Daemon, own_daemon
from tests.launch.launched import DONE_SECONDS, Launched, lines_of

__all__ = ["own_daemon"]

SCRIPT = Path(__file__).with_name("script.py")


class Launcher(Launched):
    """One launch of the script, and the files in which it leaves its traces."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        super().__init__(folder / "events.jsonl", folder / "output.txt")
        self.folder = folder
        self.url = f"file://{folder / 'run'}"
        self._daemon = daemon

    def start(self, scenario: str, *options: str) -> None:
        """Returns when it has been started."""
        self.launch(self._daemon.socket, [*options, "--", SCRIPT, self.url, self.folder, scenario])

    def told(self, rank: int = 0) -> list[dict[str, Any]]:
        """What the workers of a rank wrote, over all starts."""
        return lines_of(self.folder / f"rank{rank}.jsonl")

    def await_step(self, step: int, *, ranks: int = 1) -> None:
        """Until all ranks have done a step."""

        def there() -> bool:
            return all(any(line.get("step", 0) >= step for line in self.told(rank)) for rank in range(ranks))

        wait_until(there, f"step {step}", deadline_seconds=DONE_SECONDS, every_seconds=0.1)


HANG = ("--on-hang", "notify,end", "--hang-floor", "4", "--hang-grace", "0.5")


@pytest.fixture
def launcher_of_the_impatient(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Launcher]:
    """Its daemon ends what makes no step for 4 s."""
    found = Launcher(tmp_path, own_daemon(*HANG))
    yield found
    found.end()


@pytest.fixture
def launcher(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path, own_daemon())
    yield found
    found.end()
