"""A disk that hangs at any call: the put fails with a clear error, others go on, and what was given up leaves
nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import NoProgress
from ckptd_backends.files import Files
from ckptd_backends.local import LocalBackend, LocalOptions
from ckptd_backends.wrappers import Retrying
from devtools.processes import wait_until

PART_BYTES = 1 << 20
DATA = bytes(range(256)) * (PART_BYTES // 128)
"""Two parts."""
CALLS = ("create", "allocate", "write", "fsync", "link", "fsync_directory", "state_of")


class HangingFiles(Files):
    """One call on one file does not return until it is told to."""

    def __init__(self, call: str, name: str) -> None:
        self._call = call
        self._name = name
        self.back = threading.Event()
        self._hang(getattr(super(), call))

    def _hang(self, real: Callable[..., Any]) -> None:
        def hanging(first: Any, *more: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            if self._name in f"{path}/":
                self.back.wait()
            return real(first, *more)

        setattr(self, self._call, hanging)


@contextlib.contextmanager
def hanging(call: str) -> Iterator[HangingFiles]:
    files = HangingFiles(call, "/stuck/")
    try:
        yield files
    finally:
        files.back.set()


def backend_at(folder: Path, files: Files, seconds: float = 0.5) -> LocalBackend:
    return LocalBackend(str(folder), LocalOptions(part_bytes=PART_BYTES, no_progress_seconds=seconds), files)


@pytest.mark.parametrize("call", CALLS)
async def test_a_put_that_hangs_fails_and_others_go_on(tmp_path: Path, call: str) -> None:
    with hanging(call) as files:
        backend = backend_at(tmp_path, files)
        (tmp_path / "stuck").mkdir()
        with pytest.raises(NoProgress, match=r"no progress for 0\.\d+ s at \S+/stuck.*still there"):
            await Retrying(backend).put("stuck/x", DATA, if_absent=True)
        with pytest.raises(NoProgress):
            await backend.put("stuck/y", DATA, if_absent=True)
        patient = backend_at(tmp_path, files, seconds=60)
        await patient.put("other/x", DATA)
        assert await patient.get("other/x", limit_bytes=len(DATA)) == DATA
        await patient.aclose()
        files.back.set()
        await _until(lambda: not _temporaries(tmp_path) and not _open_files(tmp_path))
        # What hung in the very moment of appearing may be there, and is whole then; of the rest nothing appears.
        for name in ("x", "y"):
            path = tmp_path / "stuck" / name
            assert not path.exists() or (path.read_bytes() == DATA and call in ("link", "fsync_directory", "state_of"))
        patient = backend_at(tmp_path, files, seconds=60)
        await patient.put("stuck/z", DATA)
        assert await patient.get("stuck/z", limit_bytes=len(DATA)) == DATA
        await patient.aclose()
        await backend.aclose()


async def test_who_is_cancelled_waits_no_longer_than_for_progress(tmp_path: Path) -> None:
    with hanging("write") as files:
        backend = backend_at(tmp_path, files)
        put = asyncio.create_task(backend.put("stuck/x", DATA))
        await _until(lambda: bool(_temporaries(tmp_path)))
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        closing = asyncio.create_task(backend.aclose())
        await closing  # though its thread is not back
        files.back.set()
        await _until(lambda: not _temporaries(tmp_path) and not _open_files(tmp_path))
    assert not (tmp_path / "stuck" / "x").exists()


async def test_all_threads_hang_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    with hanging("state") as files:
        backend = backend_at(tmp_path, files)
        (tmp_path / "stuck").mkdir()
        found = await asyncio.gather(*(backend.head(f"stuck/{i}") for i in range(12)), return_exceptions=True)
        assert {type(error) for error in found} == {NoProgress}
        with pytest.raises(NoProgress):
            await backend.get("other", limit_bytes=1)  # no thread is left for it
        files.back.set()
        await backend.aclose()


async def test_a_slow_disk_is_no_hanging_one(tmp_path: Path) -> None:
    """Many calls wait for threads that are busy with others, all of them together for longer than the limit."""

    class Slow(Files):
        def state(self, path: str) -> Any:
            threading.Event().wait(0.1)
            return super().state(path)

    backend = backend_at(tmp_path, Slow(), seconds=3.0)
    await backend.put("x", b"1")
    found = await asyncio.gather(*(backend.head("x") for _ in range(160)))
    assert {info.size_bytes for info in found} == {1}
    await backend.aclose()


async def _until(reached: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, reached, "it", deadline_seconds=30)


def _temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob("~*"))


def _open_files(folder: Path) -> list[str]:
    found: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(link)).startswith(str(folder)):
                found.append(target)
    return found
