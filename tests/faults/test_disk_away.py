"""A disk that is not mounted for a while: nothing is put where it will be hidden, and nothing is called missing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from ckptd.checkpoint.objects import exists
from ckptd.errors import NotFound, StorageError
from ckptd.format.keys import RUN
from ckptd_backends.files import Files, FileState
from ckptd_backends.local import LocalBackend, LocalOptions
from ckptd_backends.testing import listed
from tests.faults.disk import SmallDisk

KEY = "checkpoints/a/shard"


@pytest.fixture(params=["mount point", "folder"])
def root(request: pytest.FixtureRequest, disk: SmallDisk) -> Path:
    """Of a run: the file system's own, or one below it."""
    return disk.root if request.param == "mount point" else disk.root / "run"


@contextlib.asynccontextmanager
async def run_at(root: Path, files: Files | None = None) -> AsyncGenerator[LocalBackend]:
    """With its record, one object, and none at ``KEY``."""
    backend = LocalBackend(str(root), LocalOptions(), files)
    try:
        await backend.put(RUN, b"{}")
        await backend.put("checkpoints/b", b"stored")
        await backend.delete([KEY])
        yield backend
    finally:
        await backend.aclose()


async def test_r82_while_the_disk_is_away_nothing_is_put_and_nothing_is_missing(root: Path, disk: SmallDisk) -> None:
    async with run_at(root) as backend:
        with disk.away():
            for key in (KEY, "checkpoints/b"):
                with pytest.raises(StorageError, match=f"{root} has lost its run.json.*unmounted"):
                    await backend.put(key, b"hidden")
                with pytest.raises(StorageError, match="unmounted"):
                    await backend.head(key)
                with pytest.raises(StorageError, match="unmounted"):
                    await backend.get(key, limit_bytes=100)
                with pytest.raises(StorageError, match="unmounted"):
                    await backend.read_into(key, memoryview(bytearray(6)))
                with pytest.raises(ExceptionGroup) as failed:
                    await backend.delete([key])
                assert isinstance(failed.value.exceptions[0], StorageError)
                with pytest.raises(StorageError, match="unmounted"):
                    await backend.settle(key)
            for prefix in ("", "checkpoints/"):
                with pytest.raises(StorageError, match="unmounted"):
                    await listed(backend, prefix)
            with pytest.raises(NotFound):  # so much is known, and whoever asks for it can tell why
                await backend.get(RUN, limit_bytes=100)
            assert not [path for path in disk.root.rglob("*") if path.is_file()]
        assert not await exists(backend, KEY)
        await backend.put(KEY, b"seen")
        assert await backend.get(KEY, limit_bytes=100) == b"seen"
        assert await listed(backend, "checkpoints/") == [KEY, "checkpoints/b"]


async def test_r82_an_object_is_not_hidden_by_a_disk_that_comes_back_just_then(root: Path, disk: SmallDisk) -> None:
    """The temporary was made in what was there instead."""

    class Hidden(Files):
        times = 0

        def create(self, path: str) -> int:
            if Path(path).parent != root / "checkpoints/a" or self.times == 2:
                return super().create(path)
            self.times += 1
            with disk.away(hiding=True):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                return super().create(path)

    files = Hidden()
    async with run_at(root, files) as backend:
        await backend.put(KEY, b"seen", if_absent=True)
        assert files.times == 2
        assert await backend.get(KEY, limit_bytes=100) == b"seen"


async def test_what_is_looked_for_while_the_disk_comes_back_is_found(root: Path, disk: SmallDisk) -> None:
    """The first look saw the empty folder."""

    class Blinking(Files):
        asked = True

        def state(self, path: str) -> FileState:
            if self.asked:
                return super().state(path)
            self.asked = True
            with disk.away():
                return super().state(path)

    files = Blinking()
    async with run_at(root, files) as backend:
        files.asked = False
        assert (await backend.head("checkpoints/b")).size_bytes == 6
        assert files.asked
