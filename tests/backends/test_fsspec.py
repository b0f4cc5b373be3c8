"""fsspec over two of its own file systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckptd.errors import ConfigError
from ckptd.storage import Backend, open_backend
from ckptd_backends.testing import BackendTests, Filling, listed, patterned, unique_name


class FsspecTests(BackendTests):
    copies_data = True

    def raw(self, backend: Backend) -> tuple[Any, str]:
        return fsspec.core.url_to_fs(backend.url.removeprefix("fsspec+"), skip_instance_cache=True)

    def raw_put(self, backend: Backend, key: str, data: bytes) -> None:
        fs, base = self.raw(backend)
        fs.makedirs(f"{base}/{key}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{base}/{key}", data)

    def raw_names(self, backend: Backend) -> set[str]:
        fs, base = self.raw(backend)
        return {name.removeprefix(f"{base}/") for name in fs.find(base)} if fs.exists(base) else set()


class TestFsspecMemory(FsspecTests):
    def make(self) -> Backend:
        return open_backend(f"fsspec+memory://{unique_name()}")


class TestFsspecFiles(FsspecTests):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def make(self) -> Backend:
        return open_backend(f"fsspec+file://{self.place}/{unique_name()}")

    async def test_large_objects_are_streamed_and_appear_whole(self, backend: Backend) -> None:
        data = patterned(20 << 20)
        seen: list[list[str]] = []

        async def look() -> None:
            seen.append(await listed(backend))

        await backend.put("x", Filling(data, at_completion=look))
        out = bytearray(len(data))
        await backend.read_into("x", memoryview(out))
        assert (seen, out == data) == ([[]], True)
        with pytest.raises(TimeoutError):
            await backend.put("y", Filling(data, at_completion=_time_out))
        assert self.raw_names(backend) == {"x"}


async def _time_out() -> None:
    raise TimeoutError


@pytest.mark.parametrize("url", ["fsspec+simplecache::memory://x", "nosuchscheme://x"])
def test_what_cannot_be_opened_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_backend(url)


def test_a_single_writer_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    backend = open_backend("fsspec+memory://x")
    assert not backend.capabilities.put_if_absent
    assert "single writer" in caplog.text
