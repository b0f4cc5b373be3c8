"""Files on a real file system that others have had their hands on: other users, and processes that died half way."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from ckptd.errors import AccessDenied, AlreadyExists, NotFound
from ckptd_backends.testing import Filling, listed
from tests.backends.test_local import RecordingFiles, all_names, backend_at


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize("if_absent", [True, False])
@pytest.mark.parametrize("keep", [True, False])
async def test_r173_a_temporary_that_is_swapped_is_not_published(root: Path, if_absent: bool, keep: bool) -> None:
    """By another user of the folder, who moves our file away or removes it, and puts a link in its place."""
    victim, away = root.parent / "victim", root.parent / "away"
    victim.write_bytes(b"not yours")

    async def swap() -> None:
        (temporary,) = (root / name for name in os.listdir(root) if name.startswith("~ckptd-"))
        temporary.rename(away) if keep else temporary.unlink()
        temporary.symlink_to(victim)

    async with backend_at(root) as backend:
        put = backend.put("x", Filling(b"ours", at_completion=swap), if_absent=if_absent)
        if if_absent and keep:  # what is linked is the open file, whatever its name has become
            await put
            assert await backend.get("x", limit_bytes=10) == b"ours"
        else:
            with pytest.raises(AccessDenied, match="different file"):
                await put
            assert all_names(root) == set()
    assert victim.read_bytes() == b"not yours"


async def test_r173_symbolic_links_are_not_followed(root: Path) -> None:
    secret = root.parent / "secret"
    secret.write_bytes(b"secret")
    os.mkdir(root)
    (root / "x").symlink_to(secret)
    async with backend_at(root) as backend:
        with pytest.raises(AccessDenied):
            await backend.get("x", limit_bytes=10)
        with pytest.raises(NotFound):
            await backend.head("x")
        with pytest.raises(AlreadyExists):
            await backend.put("x", b"x", if_absent=True)
        await backend.put("x", b"ours")
        assert (secret.read_bytes(), (root / "x").read_bytes()) == (b"secret", b"ours")


async def test_r173_what_is_no_file_keeps_no_reader_waiting(root: Path) -> None:
    """A pipe without a writer would, for ever; a device could."""
    os.mkdir(root)
    os.mkfifo(root / "x")
    async with backend_at(root) as backend:
        for read in (backend.get("x", limit_bytes=10), backend.read_into("x", memoryview(bytearray(4)))):
            with pytest.raises(AccessDenied, match=f"{root}/x") as refused:
                await asyncio.wait_for(read, 10)
            assert "a pipe" in refused.value.hint
        with pytest.raises(NotFound):
            await backend.head("x")
        assert await listed(backend) == []
        with pytest.raises(AlreadyExists):
            await backend.put("x", b"x", if_absent=True)
        await backend.put("x", b"ours")
        assert await backend.get("x", limit_bytes=10) == b"ours"


async def test_what_another_process_left_half_done_is_settled(root: Path) -> None:
    files = RecordingFiles()
    (root / "a").mkdir(parents=True)
    (root / "a" / "x").write_bytes(b"x")
    async with backend_at(root, files) as backend:
        await backend.settle("a/x")
        assert files.done == [
            ("fsync folder", str(root.parent)),
            ("fsync folder", str(root)),
            ("fsync folder", str(root / "a")),
        ]
        files.done.clear()
        await backend.settle("b/x")
        assert files.done == [], "nothing is there, and nothing is made"
        await backend.delete(["a/gone"])
        assert ("fsync folder", str(root / "a")) in files.done, "its removal need not be durable yet"
