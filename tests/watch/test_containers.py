"""Trainer and daemon in process namespaces of their own, as other users, with nothing in common but a socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.member import Member
from tests.daemon.trainer import begin_run
from tests.watch.conftest import Watching
from tests.watch.hanging import Hanging

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")
NOBODY = 65534
INIT = ("sh", "-c", '"$0" "$@"; exit $?')
"""As process 1, so that the trainer is not."""


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """That another user can pass through, as a volume of two containers."""
    root = Path(tempfile.mkdtemp(prefix="ckptd-shared-", dir="/tmp"))
    root.chmod(0o711)
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize(("init", "status"), [(INIT, 128 + 9), ((), None)], ids=["below-init", "process-1"])
def test_across_containers_a_hang_is_found_dumped_and_ended(
    watching: Callable[..., Watching], shared_folder: Path, tmp_run: str, init: tuple[str, ...], status: int | None
) -> None:
    if os.geteuid() != 0 or subprocess.run([*UNSHARE, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs the right to make namespaces")
    watched = watching(
        *("--on-hang", "notify,dump,end", "--hang-grace", "0", "--allow-uid", str(NOBODY)),
        socket=shared_folder / "run" / "d.sock",
        mode=0o711,
        prefix=UNSHARE,
    )
    member = Member(tmp_run)
    begin_run(member)  # nobody may not write there
    trainer = Hanging(watched.socket, member, prefix=(*UNSHARE, *init), how="hold_the_gil", begin=False, uid=NOBODY)
    with trainer.wait_for():
        (seen,) = watched.report()["ranks"]
        assert (seen["pid"], seen["process"], seen["children"]) == (0, None, [])
        assert "another namespace" in seen["note"]
        assert "hold_the_gil" in seen["stacks"]
        code = trainer.process.wait(20)
        assert code == status if status is not None else code not in (0, 1)
    assert watched.alert("ended")["ranks"] == [0]
    assert watched.watch()["counts"]["end"] == 1
