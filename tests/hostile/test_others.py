"""Another user of the machine reads nothing, and takes no place of ours; and no secret shows where others can look."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from ckptd.errors import AccessDenied
from ckptd.wire.messages import Committed
from ckptd_client import Checkpointer
from devtools.seaweedfs import S3Endpoint
from tests.chaos.children import daemons_at
from tests.daemon.trainer import Member, daemon_at, trainer

NOBODY = 65534


def _as_nobody(command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "sh", "-c", command],
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_r172_another_user_cannot_read_the_memory(socket_path: Path, tmp_run: str) -> None:
    with daemon_at(socket_path) as daemon, trainer(socket_path, Member(tmp_run)) as session:
        session.save(1)
        session.expect(Committed, step=1)
        for pid in (daemon.process.pid, os.getpid()):
            folder = Path(f"/proc/{pid}/fd")
            arenas = [path for path in folder.iterdir() if "memfd:ckptd-arena" in _target(path)]
            assert arenas, "no arena is open there"
            read = f"head -c 1 {arenas[0]}"
            assert subprocess.run(["sh", "-c", read], capture_output=True, check=False).returncode == 0
            for place in (arenas[0], f"/proc/{pid}/mem", f"/proc/{pid}/maps", f"/proc/{pid}/environ"):
                done = _as_nobody(f"head -c 1 {place}")
                assert done.returncode != 0, place
                assert b"ermission denied" in done.stderr, done.stderr
            assert b"ermission denied" in _as_nobody(f"ls /proc/{pid}/map_files").stderr


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def test_r171_a_place_that_was_taken_beforehand_is_refused(
    tmp_path: Path, tmp_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no private folder, its name can be guessed, and another user may have been there first."""
    for name in ("XDG_RUNTIME_DIR", "CKPTD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"ckptd-{os.geteuid()}"
    taken.mkdir(mode=0o700)
    os.chown(taken, NOBODY, NOBODY)
    with pytest.raises(AccessDenied, match=f"{taken} belongs to uid {NOBODY}") as caught:
        Checkpointer(tmp_run, {"x": torch.ones(3)})
    assert "--socket" in caught.value.hint


def test_no_secret_is_seen_in_processes_and_files(
    private_folders: Path, s3_server: S3Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "ckptd")
    folder = private_folders / "secrets"
    state = {"x": torch.ones(3)}
    options = s3_server.options
    with Checkpointer(s3_server.prefix(), state, socket=folder / "d.sock", storage_options=options) as ckpt:
        ckpt.save(1).wait(timeout=60)
        started = daemons_at(folder / "d.sock")
        assert [process.pid for process in started] == [ckpt.daemon_pid]
    secret = s3_server.secret_access_key
    try:
        for process in started:
            assert secret not in " ".join(process.cmdline())
            assert secret not in str(process.environ())
        for path in folder.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path
        assert secret not in caplog.text
    finally:
        for process in started:
            process.kill()
            os.waitpid(process.pid, 0)
