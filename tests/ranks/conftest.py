"""Rank processes that outlive a test, so that torch is imported once for each."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.client.conftest import Daemon, daemon, own_daemon
from tests.conftest import OURS
from tests.nursery import Nursery

__all__ = ["daemon", "own_daemon"]

ANSWER_SECONDS = 60
GONE_SECONDS = 10


class Rank:
    """One worker process, started again when it was killed."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None

    def start(self) -> None:
        """Idempotent."""
        if self._process is not None:
            return
        their_requests, requests = os.pipe()
        answers, their_answers = os.pipe()
        self._process = psutil.Process(_nursery().fork({}, their_requests, their_answers))
        os.close(their_requests)
        os.close(their_answers)
        self._requests = os.fdopen(requests, "wb")
        self._answers = os.fdopen(answers, "rb")

    @property
    def pid(self) -> int:
        """Of a rank that was started."""
        assert self._process is not None
        return self._process.pid

    def do(self, what: str, **options: Any) -> dict[str, Any]:
        """Have it done, and give the answer. Raises :class:`RankError` with the rank's own error."""
        assert self._process is not None
        self._requests.write(json.dumps({"do": what, **options}).encode() + b"\n")
        self._requests.flush()
        line = self._answers.readline()
        if not line:
            raise RankError("Died", f"the rank ended during {what}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RankError(answer["error"], answer["message"] + "\n" + answer["trace"])
        return answer

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT and the like."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(GONE_SECONDS)
            self._process = None
            self._answers.close()
            with contextlib.suppress(BrokenPipeError):  # what it was never told
                self._requests.close()


class RankError(Exception):
    """What a rank raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Ranks:
    """A world of workers."""

    def __init__(self, workers: list[Rank]) -> None:
        self._workers = workers
        self.world = 1

    def open(
        self, url: str | list[str], world: int, sockets: Path | list[Path], launch: str = "", **options: Any
    ) -> None:
        """All ranks of one start; with several sockets, each on a node of its own."""
        self.world = world
        places = sockets if isinstance(sockets, list) else [sockets] * world
        same = {"url": url, "world": world, "launch": launch or uuid.uuid4().hex, **options}
        for rank in range(world):
            self[rank].start()  # here: a process dies with the thread that started it

        def node(rank: int) -> dict[str, str]:
            return {"node": f"node{rank}"} if isinstance(sockets, list) else {}

        self.each("open", lambda rank: {"rank": rank, "socket": str(places[rank]), **node(rank), **same})

    def group(self, world: int, folder: Path, **options: float) -> None:
        """Let ranks join a process group, until the test is over."""
        self.world = world
        for rank in range(world):
            self[rank].start()
        store = str(folder / f"store-{uuid.uuid4().hex}")
        self.each("group", lambda rank: {"store": store, "rank": rank, "world": world, **options})

    def __getitem__(self, rank: int) -> Rank:
        return self._workers[rank]

    def each(
        self, what: str, options: Callable[[int], dict[str, Any]] | None = None, **same: Any
    ) -> list[dict[str, Any]]:
        """The same request to all ranks at once; their answers by rank. Raises the first rank's error."""
        with ThreadPoolExecutor(self.world) as pool:
            calls = [
                pool.submit(self[rank].do, what, **(options(rank) if options else same)) for rank in range(self.world)
            ]
            try:
                return [call.result(ANSWER_SECONDS) for call in calls]
            except TimeoutError:
                self.kill()  # or their threads would be waited for without end
                raise

    def kill(self) -> None:
        """SIGKILL all."""
        for rank in range(self.world):
            self[rank].kill()

    def run_and_save(self, steps: int) -> None:
        """Restore what is there, do some steps, and save the state that they end in."""
        self.each("restore")
        self.each("run", steps=steps)
        self.each("save_as_it_is", step=steps)

    def train(self, first: int, last: int) -> list[dict[str, Any]]:
        """Steps ``first`` to ``last``, all ranks side by side; the answers to the last."""
        for step in range(first, last + 1):
            answers = self.each("train", step=step)
        return answers


@functools.cache
def _nursery() -> Nursery:
    """Nobody closes it: it ends with this process."""
    return Nursery(
        "tests.ranks.nursery",
        {name: value for name, value in os.environ.items() if name != OURS},  # no single test's own
    ).__enter__()


_workers = [Rank() for _ in range(4)]
_others = [Rank() for _ in range(4)]


def _running(found: list[Rank]) -> Iterator[list[Rank]]:
    for rank in found:
        rank.start()
    yield found
    for rank in found:
        rank.kill()


@pytest.fixture(scope="session")
def workers(private_folders: Path) -> Iterator[list[Rank]]:
    """Four of them; started when first asked, and the same in every folder of tests."""
    yield from _running(_workers)


@pytest.fixture(scope="session")
def others(private_folders: Path) -> Iterator[Ranks]:
    """A world of other processes, for what is to be restored while those that saved it live."""
    found = Ranks(_others)
    for _ in _running(_others):
        yield found


@pytest.fixture
def ranks(workers: list[Rank], own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Ranks]:
    """A world for one test. It leaves before the test's own daemons and folder do: a rank waits for a daemon that is
    gone, and for a store to which it cannot give its claim back."""
    found = Ranks(workers)
    yield found
    for worker in workers:
        worker.start()
        try:
            worker.do("ungroup")
        except RankError:
            worker.kill()
    for worker in workers:
        worker.start()  # outside of what the next test counts as its own
