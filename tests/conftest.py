"""What every test stands on: a real S3 server, a private place for sockets, and proof that nothing is left behind.

A skip is a failure unless its reason stands in ``allowed_skips.txt``: a suite must not go green by testing less.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, settings

from devtools.seaweedfs import S3Endpoint, SeaweedFS

ALLOWED_SKIPS = {
    line
    for line in (Path(__file__).parent / "allowed_skips.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
OURS = "CKPTD_TEST_OWNER"
"""An environment variable that every descendant of a test inherits, however far it has detached itself."""
GOING_SECONDS = 20
"""How long what a test started may take to end after the test."""
LONGEST = (
    "ranks/test_flat",
    "examples/",
    "ranks/",
    "chaos/",
    "launch/",
    "test_readme",
    "test_bench",
    "client/",
    "daemon/",
    "cases/",
)
"""What takes long, the longest first: how the names of its files begin, below this folder."""
FOREIGN_FILES = ("/dev/", "/proc/", "/sys/", "/usr/", os.path.realpath(sys.prefix), sys.prefix, sys.base_prefix)
"""Where libraries keep files open for good."""

# How long an example takes, and how many a second there are, is the machine's affair and no property.
_BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
# The same examples each time, so that whether a change passes does not depend on luck.
settings.register_profile("same", _BUSY, derandomize=True, database=None)
# New ones each time, and those that failed come again: for `--hypothesis-profile random`.
settings.register_profile("random", _BUSY, derandomize=False, print_blob=True)
settings.load_profile("same")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


# Skips


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the S3 server, so that ``-m s3`` finds it; skip what needs a GPU where there is none.

    The longest files come first: where several processes share the tests, none is left with one of them at the end.
    """
    items.sort(key=lambda item: _place(item.path))
    for item in items:
        if {"s3_server", "own_s3_server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("s3")
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and not _cuda():
        for item in needy:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _place(path: Path) -> int:
    """The place of a file in the order of the suite; files of the same place stay as they were collected."""
    name = os.path.relpath(path, Path(__file__).parent)
    return next((place for place, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip for a reason that is not on the list into a failure."""
    return _judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that skips itself."""
    return _judge((yield))


def _judge(report: Report) -> Report:
    if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in ALLOWED_SKIPS:
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that is not in tests/allowed_skips.txt: {reason}"
    return report


# Places and servers


@pytest.fixture(scope="session", autouse=True)
def private_folders() -> Iterator[Path]:
    """Sockets, logs and journals of daemons go below one short path of ours, never into the user's own folders."""
    root = Path(tempfile.mkdtemp(prefix="ckptd-", dir="/tmp"))  # a socket's path has to fit into 107 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OURS, uuid.uuid4().hex)
        for name, folder in (("XDG_RUNTIME_DIR", "run"), ("XDG_STATE_HOME", "state"), ("XDG_CACHE_HOME", "cache")):
            (root / folder).mkdir(mode=0o700)
            patch.setenv(name, str(root / folder))
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, str(root / "none"))
        yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server(private_folders: Path) -> Iterator[S3Endpoint]:
    """The suite's one S3 server: our own, or the one that ``CKPTD_TEST_S3_ENDPOINT`` names. Use ``prefix()`` of it."""
    endpoint_url = os.environ.get("CKPTD_TEST_S3_ENDPOINT")
    if endpoint_url:
        external = S3Endpoint(
            endpoint_url,
            access_key_id=os.environ["CKPTD_TEST_S3_ACCESS_KEY"],
            secret_access_key=os.environ["CKPTD_TEST_S3_SECRET_KEY"],
            bucket=os.environ["CKPTD_TEST_S3_BUCKET"],
        )
        external.create_bucket()
        yield external
        return
    with SeaweedFS(private_folders / "s3") as server:
        yield server


@pytest.fixture
def own_s3_server(tmp_path: Path) -> Iterator[SeaweedFS]:
    """A server for this test alone, to kill, stop or restart."""
    if os.environ.get("CKPTD_TEST_S3_ENDPOINT"):
        pytest.skip("needs an S3 server of our own")
    with SeaweedFS(tmp_path / "own-s3") as server:
        yield server


@pytest.fixture
def tmp_run(tmp_path: Path) -> str:
    """The root URL of a run on local disk that does not exist yet."""
    return f"file://{tmp_path / 'run'}"


# Hygiene


@pytest.fixture(autouse=True)
def nothing_left_behind(private_folders: Path) -> Iterator[None]:
    """Fail a test that leaves processes, threads or open files behind, and end the processes for the tests to come.

    What wider fixtures hold is set up earlier and so not counted.
    """
    before = _Holdings()
    yield
    deadline = time.monotonic() + GOING_SECONDS
    while (left := _Holdings().beyond(before)) and time.monotonic() < deadline:
        gc.collect()  # connection pools lie in reference cycles: what only waits for the collector is no leak
        time.sleep(0.02)
    for process in _our_processes() - before.processes:
        process.kill()
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


class _Holdings:
    """Processes, threads and descriptors that are ours at one moment."""

    def __init__(self) -> None:
        self.processes = _our_processes()
        self.threads = {thread for thread in threading.enumerate() if thread.is_alive()}
        self.files = _our_files()

    def beyond(self, before: _Holdings) -> list[str]:
        """What is held now and was not before, in words."""
        return [
            *(f"process {process.pid} {_command(process)}" for process in self.processes - before.processes),
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"descriptor {number} -> {target}" for number, target in self.files - before.files),
        ]


def _our_processes() -> set[psutil.Process]:
    """Every living process that inherited this session's mark, children of init included; not this one."""
    mark = f"{OURS}={os.environ[OURS]}".encode()
    found: set[psutil.Process] = set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if pid != os.getpid() and mark in environ.read().split(b"\0"):
                    found.add(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue  # it ended, or is another user's
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(ended)"


def _our_files() -> set[tuple[int, str]]:
    """Descriptors of the kinds that we open: sockets, shared memory, pidfds and files. Event loops and libraries keep
    epolls, pipes and devices as they like."""
    found: set[tuple[int, str]] = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith(("socket:", "anon_inode:[pidfd]", "/")) and not target.startswith(FOREIGN_FILES):
            found.add((int(link.name), target))
    return found
