"""What a daemon may take of its machine: what is set is what the kernel says of the process, and what goes out."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import ExitStack
from pathlib import Path
from types import coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon import cgroups
from ckptd.daemon.budgets import Budgets
from ckptd.daemon.processors import processor_count
from ckptd.errors import ConfigError
from ckptd.limits import DIGEST_THREADS_MAX, IO_THREADS_PER_PROCESSOR, MIB
from ckptd.pace import Pace
from ckptd.storage import open_backend
from ckptd.wire.messages import Committed
from tests.daemon.trainer import Member, daemon_at, trainer

SIZE = 900_000
PART_BYTES = 65536
PARTS = {"part_bytes": PART_BYTES}


# Bandwidth


class Simulated:
    """A clock that moves only when all wait, and tasks that wait for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[tuple[float, int]] = []
        self._waiting: list[tuple[float, int, int, Coroutine[Any, Any, None]]] = []
        self._count = 0

    def sleep(self, seconds: float) -> Awaitable[None]:
        @coroutine
        def wait() -> Generator[float]:
            yield self.now + max(seconds, 0.0)

        return wait()

    def start(self, at: float, size: int, call: Coroutine[Any, Any, None]) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (at, self._count, size, call))

    def run(self) -> None:
        while self._waiting:
            self.now, number, size, call = heapq.heappop(self._waiting)
            try:
                heapq.heappush(self._waiting, (call.send(None), number, size, call))
            except StopIteration:
                self.ended.append((self.now, size))


payments = st.lists(st.tuples(st.floats(0, 100, allow_nan=False), st.integers(0, 10**9)), min_size=1, max_size=40)


@given(payments, st.floats(1e-3, 1e10, allow_nan=False))
def test_no_span_of_time_sees_more_than_its_share(found: list[tuple[float, int]], rate: float) -> None:
    simulated = Simulated()
    pace = Pace(rate, clock=lambda: simulated.now, sleep=simulated.sleep)
    for at, size in sorted(found):
        simulated.start(at, size, pace.pay(size))
    simulated.run()
    assert len(simulated.ended) == len(found)
    for first, (began, own) in enumerate(simulated.ended):
        gone = 0
        for ended, size in simulated.ended[first:]:
            gone += size
            allowed = rate * (ended - began) + own
            assert gone <= allowed * (1 + 1e-6) + rate * 1e-6
    # And it is not slower than that: what has waited from the beginning has gone when all is paid for.
    last = max(at for at, _ in found) + sum(size for _, size in found) / rate
    assert simulated.now <= last * (1 + 1e-9)


def test_a_rate_that_lets_nothing_pass_is_refused() -> None:
    for rate in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="above zero"):
            Pace(rate)


def test_all_stores_share_one_bandwidth(socket_path: Path, tmp_run: str) -> None:
    """A lower bound only: the budget is a promise, how much slower it gets is not."""
    with daemon_at(socket_path, "--bandwidth", "1") as daemon, ExitStack() as stack:
        members = [Member(f"{tmp_run}-{name}", storage_options=PARTS) for name in "ab"]
        sessions = [stack.enter_context(trainer(daemon.socket, member)) for member in members]
        began = time.monotonic()
        for session in sessions:
            session.save(1, SIZE)
        for session in sessions:
            session.expect(Committed)
        assert time.monotonic() - began >= (2 * SIZE - PART_BYTES) / MIB


# Threads and priorities


def _of_threads(pid: int) -> list[int]:
    return [int(folder.name) for folder in Path(f"/proc/{pid}/task").iterdir()]


def _io_priority(tid: int) -> str:
    done = subprocess.run(["ionice", "-p", str(tid)], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


@pytest.mark.parametrize(("io_priority", "said"), [("low", "best-effort: prio 7"), ("idle", "idle")])
def test_every_thread_stands_back_as_far_as_is_set(
    socket_path: Path, tmp_run: str, io_priority: str, said: str
) -> None:
    options = ("--nice", "7", "--io-priority", io_priority)
    with daemon_at(socket_path, *options) as daemon, trainer(daemon.socket, Member(tmp_run)) as session:
        session.save(1)
        session.expect(Committed)
        tids = _of_threads(daemon.process.pid)
        assert len(tids) > 3, "the main thread, and some that have digested and written"
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert {os.getpriority(os.PRIO_PROCESS, tid) for tid in tids} == {min(own + 7, 19)}
        assert {_io_priority(tid) for tid in tids} == {said}
        budgets = session.status()["budgets"]
        assert (budgets["nice"], budgets["io_priority"]) == (min(own + 7, 19), io_priority)


def test_there_are_no_more_threads_than_are_set(
    socket_path: Path, tmp_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the environment, as a daemon that a client starts is told."""
    monkeypatch.setenv("CKPTD_DIGEST_THREADS", "1")
    monkeypatch.setenv("CKPTD_IO_THREADS", "1")
    with daemon_at(socket_path) as daemon, ExitStack() as stack:
        members = [Member(tmp_run, rank=rank, world=4, storage_options=PARTS) for rank in range(4)]
        sessions = [stack.enter_context(trainer(daemon.socket, member)) for member in members]
        for step in (1, 2):
            for session in sessions:
                session.save(step, SIZE)
            for session in sessions:
                session.expect(Committed, step=step)
        status = session.status()
        threads, budgets = status["threads"], status["budgets"]
        assert threads["ckptd-digest"] == 1
        assert threads[f"ckptd-file-{Path(tmp_run).name}"] == 1
        assert threads["ckptd-other"] <= budgets["other_threads"]
        assert sum(threads.values()) == len(_of_threads(daemon.process.pid))
        assert (budgets["digest_threads"], budgets["io_threads"]) == (1, 1)


@pytest.mark.parametrize("url", ["file:///nowhere/run", "s3://bucket/run", "fsspec+memory://run", "memory://run"])
def test_no_backend_takes_more_threads_than_there_are_for_a_store(url: str) -> None:
    wished = open_backend(url).capabilities.inflight_max
    assert open_backend(url, threads_max=2).capabilities.inflight_max == min(wished, 2)
    if url.startswith(("file", "s3")):
        assert wished > 2
        assert open_backend(url, {"inflight_max": 1}, threads_max=2).capabilities.inflight_max == 1


# Processors

OWN = {"v2": "0::/slice/job\n", "v1": "5:memory:/elsewhere\n4:cpu,cpuacct:/slice/job\n0::/\n"}
COUNT = "from ckptd.daemon.processors import processor_count; print(processor_count())"


def _limit(root: Path, version: str, where: str, quota: str, period: str) -> None:
    folder = root / where if version == "v2" else root / "cpu" / where
    folder.mkdir(parents=True, exist_ok=True)
    if version == "v2":
        (folder / "cpu.max").write_text(f"{quota} {period}\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text(f"{'-1' if quota == 'max' else quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_quota_counts(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel's files look like, as it writes them."""
    own = tmp_path / "own"
    own.write_text(OWN[version])
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", own)
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert processor_count() == 64
    _limit(tmp_path, version, "slice/job", "max", "100000")
    assert processor_count() == 64
    assert Budgets().digest_threads_used == DIGEST_THREADS_MAX
    _limit(tmp_path, version, "slice", "350000", "100000")
    assert processor_count() == 3.5
    assert (Budgets().digest_threads_used, Budgets().io_threads_used) == (3, 3 * IO_THREADS_PER_PROCESSOR)
    _limit(tmp_path, version, "slice/job", "25000", "50000")
    assert processor_count() == 0.5
    assert Budgets().digest_threads_used == 1
    assert Budgets(digest_threads=9, io_threads=2).io_threads_used == 2
    assert Budgets(digest_threads=9).digest_threads_used == 9


def test_affinity_counts() -> None:
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(one), sys.executable, "-c", COUNT], capture_output=True, text=True, check=True, timeout=60
    )
    assert float(done.stdout) <= 1


def test_a_quota_of_the_kernel_counts() -> None:
    """In a cgroup of its own, where one can be made."""
    parent, version = next(iter(cgroups.own_folders("cpu")), (None, 0))
    if parent is None:
        pytest.skip("needs the right to make cgroups")
    folder = parent / f"ckptd-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs the right to make cgroups")
    try:
        try:
            if version == 2:
                (folder / "cpu.max").write_text("50000 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text("50000")
        except OSError:
            pytest.skip("needs the right to make cgroups")
        inside = f"echo $$ > {folder}/cgroup.procs && exec {sys.executable} -c '{COUNT}'"
        done = subprocess.run(["sh", "-c", inside], capture_output=True, text=True, check=True, timeout=100)
        assert float(done.stdout) == 0.5
    finally:
        folder.rmdir()
