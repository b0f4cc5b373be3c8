"""Files on a real file system."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from ckptd.errors import AccessDenied, AlreadyExists, StorageError, StorageFull, Unavailable, UsageError
from ckptd.format import keys
from ckptd.format.keys import KEY_PATTERN
from ckptd.storage import Backend, open_backend
from ckptd_backends.files import Files
from ckptd_backends.local import LocalBackend, LocalOptions
from ckptd_backends.local_directories import Directories
from ckptd_backends.local_temporaries import sweep, temporary_name
from ckptd_backends.testing import BackendTests, Filling, listed, patterned, unique_name

MAP_NORESERVE = 0x4000
"""Linux's number, which Python does not name."""


class TestLocal(BackendTests):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def make(self) -> Backend:
        return open_backend(str(self.place / "new" / unique_name()), {"part_bytes": 1 << 20})

    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        path = root_of(backend) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_names(self, backend: Backend) -> set[str]:
        root = root_of(backend)
        return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or not any(path.iterdir())}


def root_of(backend: Backend) -> Path:
    return Path(backend.url.removeprefix("file://"))


# What only files have


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


class RecordingFiles(Files):
    """The real thing, with a list of what was done."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def create(self, path: str) -> int:
        self.done.append(("create", os.path.dirname(path)))
        return super().create(path)

    def fsync(self, descriptor: int) -> None:
        self.done.append(("fsync", ""))
        super().fsync(descriptor)

    def link(self, descriptor: int, target: str) -> None:
        self.done.append(("name", target))
        super().link(descriptor, target)

    def rename(self, source: str, target: str) -> None:
        self.done.append(("name", target))
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.done.append(("unlink", path if "~" not in path else "temporary"))
        super().unlink(path)

    def make_directory(self, path: str) -> None:
        self.done.append(("mkdir", path))
        super().make_directory(path)

    def fsync_directory(self, path: str) -> None:
        self.done.append(("fsync folder", path))
        super().fsync_directory(path)


@contextlib.asynccontextmanager
async def backend_at(root: Path, files: Files | None = None) -> AsyncGenerator[LocalBackend]:
    backend = LocalBackend(str(root), LocalOptions(part_bytes=1 << 20), files)
    try:
        yield backend
    finally:
        await backend.aclose()


def all_names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


def aligned(size: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = patterned(size)
    return memory.toreadonly()


def takes_direct(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.pwrite(descriptor, mmap.mmap(-1, 4096), 0)
    except OSError:
        return False
    os.close(descriptor)
    return True


async def test_aligned_memory_is_written_directly(root: Path, tmp_path: Path) -> None:
    expected = "direct" if takes_direct(tmp_path) else "buffered"
    data = aligned((3 << 20) + 4096 + 77)
    async with backend_at(root) as backend:
        assert (await backend.put("a", data)).path_taken == expected
        assert (await backend.put("b", data[1:])).path_taken == "buffered"
        assert (await backend.put("c", data[:100])).path_taken == "buffered"
        out = bytearray(len(data))
        await backend.read_into("a", memoryview(out))
        assert out == data
        whole = mmap.mmap(-1, 8 << 20)  # aligned, and large enough to be read directly
        await backend.put("d", memoryview(whole))
        await backend.read_into("d", memoryview(whole)[: 5 << 20], offset=4096)
        whole.close()  # nobody holds on to it


async def test_a_file_system_that_refuses_direct_writes_late(root: Path) -> None:
    class Late(Files):
        def __init__(self) -> None:
            self.direct = False

        def set_direct(self, descriptor: int, direct: bool) -> None:
            self.direct = direct

        def write(self, descriptor: int, data: memoryview, offset: int) -> int:
            if self.direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().write(descriptor, data, offset)

    data = aligned(3 << 20)
    async with backend_at(root, Late()) as backend:
        assert (await backend.put("x", data)).path_taken == "buffered"
    assert (root / "x").read_bytes() == data


@pytest.mark.parametrize("most", [65_536, 1000])
async def test_r01_short_writes_and_reads_go_on(root: Path, most: int) -> None:
    """At most so many bytes a call; 1000 leaves direct I/O unaligned, which the kernel itself then refuses."""

    class Short(Files):
        def write(self, descriptor: int, data: memoryview, offset: int) -> int:
            return super().write(descriptor, data[:most], offset)

        def read(self, descriptor: int, out: memoryview, offset: int) -> int:
            return super().read(descriptor, out[:most], offset)

    data = aligned((4 << 20) + 777)
    async with backend_at(root, Short()) as backend:
        await backend.put("x", data)
        out = mmap.mmap(-1, len(data))
        await backend.read_into("x", memoryview(out))
        assert (root / "x").read_bytes() == data == out[:]


async def test_the_order_of_durability(root: Path) -> None:
    files = RecordingFiles()
    folder, top = root / "a", str(root.parent)
    async with backend_at(root, files) as backend:
        await backend.put("a/x", b"first", if_absent=True)
        assert files.done == [
            ("mkdir", str(root)),
            ("fsync folder", top),
            ("mkdir", str(folder)),
            ("fsync folder", str(root)),
            ("create", str(folder)),
            ("fsync", ""),
            ("name", str(folder / "x")),
            ("unlink", "temporary"),
            ("fsync folder", str(folder)),
        ]
        files.done.clear()
        with pytest.raises(AlreadyExists):
            await backend.put("a/x", b"second", if_absent=True)
        assert files.done[-2:] == [("fsync folder", str(folder)), ("unlink", "temporary")]
        files.done.clear()
        await backend.put("a/x", b"third")
        assert files.done == [
            ("create", str(folder)),
            ("fsync", ""),
            ("name", str(folder / "x")),
            ("fsync folder", str(folder)),
        ]
        files.done.clear()
        await backend.delete(["a/x"])
        assert files.done == [("unlink", str(folder / "x")), ("fsync folder", str(folder))]
    files.done.clear()
    async with backend_at(root, files) as another:  # a folder that another process made may not be durable yet
        await another.put("x", b"x")
        assert ("fsync folder", top) in files.done


async def test_a_failed_sync_is_never_repeated(root: Path) -> None:
    class Failing(RecordingFiles):
        def fsync(self, descriptor: int) -> None:
            super().fsync(descriptor)
            raise OSError(errno.EIO, "Input/output error")

    files = Failing()
    async with backend_at(root, files) as backend:
        with pytest.raises(Unavailable):
            await backend.put("x", b"x")
    assert files.done.count(("fsync", "")) == 1
    assert all_names(root) == set()


async def test_a_full_disk_shows_before_anything_is_written() -> None:
    """A tmpfs refuses at once what is larger than itself."""
    root = Path("/dev/shm") / f"ckptd-test-{unique_name()}"
    room = os.statvfs("/dev/shm")
    size = room.f_blocks * room.f_frsize + (1 << 30)
    nothing = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    try:
        async with backend_at(root) as backend:
            with pytest.raises(StorageFull, match=rf"{root}/x.*needs {size} bytes, free \d+ bytes"):
                await backend.put("x", memoryview(nothing))
            assert all_names(root) == set()
    finally:
        nothing.close()
        root.rmdir()


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)])
async def test_r84_modes_follow_the_umask(root: Path, umask: int, file_mode: int, folder_mode: int) -> None:
    before = os.umask(umask)
    try:
        async with backend_at(root) as backend:
            await backend.put("a/x", b"x", if_absent=True)
            await backend.put("a/y", b"y")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in ("a/x", "a/y")] == [file_mode] * 2
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in (".", "a")] == [folder_mode] * 2


class NoLinks(Files):
    def link(self, descriptor: int, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")


class NoLinksNoRename(NoLinks):
    def rename_noreplace(self, source: str, target: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


async def test_without_links_a_rename_that_replaces_nothing(root: Path) -> None:
    async with backend_at(root, NoLinks()) as backend:
        await backend.put("x", b"first", if_absent=True)
        with pytest.raises(AlreadyExists):
            await backend.put("x", b"other", if_absent=True)
    assert ((root / "x").read_bytes(), all_names(root)) == (b"first", {"x"})


async def test_without_either_a_conditional_put_is_refused(root: Path) -> None:
    async with backend_at(root, NoLinksNoRename()) as backend:
        with pytest.raises(StorageError, match="neither hard links nor rename"):
            await backend.put("x", b"x", if_absent=True)
        assert all_names(root) == set()


async def test_an_object_is_no_folder(root: Path) -> None:
    async with backend_at(root) as backend:
        await backend.put("a", b"x")
        with pytest.raises(UsageError, match="prefix"):
            await backend.put("a/b", b"x")
        await backend.put("c/d", b"x")
        with pytest.raises(UsageError, match="prefix"):
            await backend.put("c", b"x")
        await backend.delete(["c", "a/b"])
        assert await listed(backend) == ["a", "c/d"]


async def test_an_unwritable_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    async with backend_at(tmp_path / "file" / "run") as backend:
        with pytest.raises(UsageError, match="not a folder"):
            await backend.put("x", b"x")
    async with backend_at(Path("/proc/run")) as backend:
        with pytest.raises(AccessDenied, match="/proc takes none"):
            await backend.put("x", b"x")


async def test_a_folder_that_is_swept_while_it_is_being_made_is_made_again(root: Path) -> None:
    class Swept(Files):
        left = 3

        def make_directory(self, path: str) -> None:
            super().make_directory(path)
            if path.endswith("/folder") and self.left:
                self.left -= 1
                os.rmdir(path)  # as another process does with a folder that it finds empty

    async with backend_at(root, Swept()) as backend:
        await backend.put("folder/inner/x", b"x")
        assert await backend.get("folder/inner/x", limit_bytes=10) == b"x"


async def test_deletes_that_fail_are_collected(root: Path) -> None:
    class Stuck(Files):
        def unlink(self, path: str) -> None:
            if path.endswith("/b"):
                raise OSError(errno.EPERM, "Operation not permitted")
            super().unlink(path)

    async with backend_at(root, Stuck()) as backend:
        for key in "abc":
            await backend.put(key, b"x")
        with pytest.raises(ExceptionGroup) as failed:
            await backend.delete("abc")
        (error,) = failed.value.exceptions
        assert isinstance(error, AccessDenied)
        assert error.key == "b"
        assert await listed(backend) == ["b"]


def test_temporaries_are_known_by_name() -> None:
    prefix, made, machine, unique = temporary_name().split("-")
    assert (prefix, len(machine), len(unique)) == ("~ckptd", 12, 16)
    assert abs(int(made) - time.time()) <= 2
    assert KEY_PATTERN.fullmatch(temporary_name()) is None


KILLED = """
import asyncio, os, signal, sys
from ckptd_backends.local import LocalBackend, LocalOptions
from ckptd_backends.testing import Filling

async def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

async def main() -> None:
    for key in sys.argv[2:]:
        await LocalBackend(sys.argv[1], LocalOptions()).put(key, Filling(b"x" * 10_000, at_completion=die))

asyncio.run(main())
"""


def temporaries(root: Path) -> set[Path]:
    return set(root.rglob("~ckptd-*"))


def age(path: Path) -> None:
    """As if nobody had written to it for longer than a day."""
    then = time.time() - 90_000
    os.utime(path, (then, then))


def left_behind(root: Path, key: str) -> Path:
    """The temporary of a writer that was killed."""
    before = temporaries(root)
    died = subprocess.run([sys.executable, "-c", KILLED, root, key], check=False, timeout=20)
    assert died.returncode == -signal.SIGKILL
    (left,) = temporaries(root) - before
    return left


async def test_temporaries_of_the_dead_are_swept_and_no_others(root: Path) -> None:
    folders = [value for value in vars(keys).values() if isinstance(value, str) and value.endswith("/")]
    assert {keys.CHECKPOINTS, keys.LOG} < set(folders)
    left = [left_behind(root, f"{folder}1/a") for folder in folders]
    # Of another machine: its writer cannot be seen, so only age counts.
    fresh, old, foreign = (root / "leases" / f"~ckptd-1700000000-{'0' * 12}-{number:016d}" for number in range(3))
    fresh.parent.mkdir(exist_ok=True)
    for path in (fresh, old):
        path.write_bytes(b"x")
    age(old)
    foreign.symlink_to(fresh)
    elsewhere = root / "mine" / left[0].name
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(b"not in a folder of ours")
    swept: list[int] = []

    async def sweep() -> None:
        async with backend_at(root) as another:
            swept.append(await another.abort_stale_uploads())

    async with backend_at(root) as backend:
        await backend.put("checkpoints/1/a", Filling(b"ours", at_completion=sweep))
        assert await backend.get("checkpoints/1/a", limit_bytes=10) == b"ours"
    await sweep()
    assert swept == [len(left) + 1, 0]
    assert temporaries(root) == {fresh, foreign, elsewhere}
    assert not (root / "manifests").exists()


async def test_where_nothing_can_be_locked_only_age_counts(root: Path) -> None:
    class NoLocks(Files):
        def lock(self, descriptor: int) -> bool:
            raise OSError(errno.ENOLCK, "No locks available")

    left = left_behind(root, "manifests/a")
    async with backend_at(root, NoLocks()) as backend:
        await backend.put("manifests/b", b"x", if_absent=True)
        assert await backend.abort_stale_uploads() == 0
        age(left)
        assert await backend.abort_stale_uploads() == 1
    assert all_names(root) == {"manifests/b"}


async def test_a_temporary_that_is_swept_before_it_is_locked_is_made_anew(root: Path) -> None:
    class Raced(Files):
        swept = 0

        def create(self, path: str) -> int:
            descriptor = super().create(path)
            if not self.swept:
                self.swept, failures = sweep(Files(), Directories(Files(), str(root)), str(root))
                assert not failures
            return descriptor

    files = Raced()
    async with backend_at(root, files) as backend:
        await backend.put("manifests/a", b"x")
    assert (files.swept, all_names(root)) == (1, {"manifests/a"})


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOSPC, StorageFull, "free some space"),
        (errno.EDQUOT, StorageFull, "quota raised"),
        (errno.EACCES, AccessDenied, "right to read and write"),
        (errno.EROFS, AccessDenied, "mount"),
    ],
)
async def test_what_is_refused_comes_with_what_to_do(
    root: Path, number: int, kind: type[StorageError], hint: str
) -> None:
    class Refusing(Files):
        def create(self, path: str) -> int:
            raise OSError(number, os.strerror(number))

    async with backend_at(root, Refusing()) as backend:
        with pytest.raises(kind) as failed:
            await backend.put("x", b"x")
    assert hint in failed.value.hint
