"""Real faults of a real disk, through a real daemon: a save fails or succeeds as it says, training goes on, and the
next save works when the fault is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import verify
from ckptd.cli.daemon_call import call
from ckptd.errors import AccessDenied, DeadlineExceeded, SaveError
from ckptd.storage import open_backend
from ckptd.wire.messages import GetStatus, Status
from ckptd_client import Checkpointer, Keep, Save, open_checkpoint
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training, committed
from tests.faults.disk import DiskWithQuotas, SmallDisk


@dataclass
class Scene:
    """Where a test plays."""

    disk: SmallDisk
    daemon: Daemon
    run: Path

    @property
    def url(self) -> str:
        return f"file://{self.run}"

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.daemon.pid)


SceneOf = Callable[[SmallDisk], Scene]


@pytest.fixture
def scene_of(daemon: Daemon, request: pytest.FixtureRequest) -> SceneOf:
    """On a disk."""
    return lambda disk: Scene(disk, daemon, disk.root / f"run-{abs(hash(request.node.nodeid)) % 10**8}")


@pytest.fixture
def scene(disk: SmallDisk, scene_of: SceneOf) -> Iterator[Scene]:
    found = scene_of(disk)
    yield found
    shutil.rmtree(found.run, ignore_errors=True)


@contextlib.contextmanager
def small_files_only(scene: Scene) -> Iterator[None]:
    """As a quota on files does."""
    before = scene.process.rlimit(resource.RLIMIT_FSIZE)
    scene.process.rlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        scene.process.rlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def closed_folders(scene: Scene) -> Iterator[None]:
    """Somebody has changed the modes."""
    folders = [scene.run, *(path for path in scene.run.rglob("*") if path.is_dir())]
    modes = {path: path.stat().st_mode for path in folders}
    for path in folders:
        path.chmod(0o500)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@contextlib.contextmanager
def root_away(scene: Scene) -> Iterator[None]:
    """Somebody has moved the run, or not mounted its disk."""
    away = scene.run.with_name("away")
    scene.run.rename(away)
    try:
        yield
    finally:
        shutil.rmtree(scene.run, ignore_errors=True)
        away.rename(scene.run)


@dataclass(frozen=True)
class Fault:
    present: Callable[[Scene], AbstractContextManager[None]]
    says: str
    """What went wrong and what to do, as a pattern."""


FAULTS = {
    "full": Fault(lambda scene: scene.disk.full(), r"disk full at \S+/run-.*needs \d+ bytes, free.*free some space"),
    "out of names": Fault(lambda scene: scene.disk.out_of_names(), r"disk full at \S+/run-.*free some space"),
    "promising too much": Fault(
        lambda scene: scene.disk.promising_too_much(), r"(disk full|Read-only file system) at \S+/run-"
    ),
    "read-only": Fault(lambda scene: scene.disk.read_only(), r"Read-only.*/run-.*mount the file system for writing"),
    "permission lost": Fault(closed_folders, r"Permission denied at \S+/run-.*the right to read and write"),
    "small files only": Fault(small_files_only, r"File too large at \S+/run-.*ulimit -f"),
    "root away": Fault(root_away, r"/run-\S+run\.json is missing.*mount it or bring it back"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_r82_a_fault_of_the_disk_fails_one_save_and_training_goes_on(name: str, scene: Scene) -> None:
    training = Training()
    with Checkpointer(scene.url, training.state, keep=Keep(last=5), socket=scene.daemon.socket) as ckpt:
        _train_and_save(training, ckpt, 1)
        with FAULTS[name].present(scene):
            training.step()
            failed = ckpt.save(2)
            with pytest.raises(SaveError, match=f"(?s){FAULTS[name].says}"):
                failed.wait(timeout=60)
            training.step()
            _check_closed(scene)
        _train_and_save(training, ckpt, 4)
    _check(scene, [1, 4])


def test_r82_a_full_quota_fails_one_save_and_names_it(
    disk_with_quotas: DiskWithQuotas, daemon: Daemon, scene_of: SceneOf
) -> None:
    """A real EDQUOT; the next save works once the quota is raised."""
    scene, training = scene_of(disk_with_quotas), Training()
    with Checkpointer(scene.url, training.state, keep=Keep(last=5), socket=daemon.socket) as ckpt:
        _train_and_save(training, ckpt, 1)
        with disk_with_quotas.small_quota():
            training.step()
            failed = ckpt.save(2)
            says = r"(?s)quota full at \S+/run-.*needs \d+ bytes.*on the disk as a whole.*have the quota raised"
            with pytest.raises(SaveError, match=says):
                failed.wait(timeout=60)
            training.step()
            _check_closed(scene)
        _train_and_save(training, ckpt, 4)
    _check(scene, [1, 4])


def test_a_disk_that_hangs_fails_its_saves_and_no_others(scene: Scene, tmp_path: Path) -> None:
    """Writes never return, for longer than the limit on that. When the disk comes back nothing is lost, and nothing
    of the save that was given up appears."""
    training, elsewhere = Training(), Training()
    options = {"no_progress_seconds": 3.0}
    with (
        Checkpointer(
            scene.url, training.state, keep=Keep(last=5), socket=scene.daemon.socket, storage_options=options
        ) as ckpt,
        Checkpointer(f"file://{tmp_path / 'run'}", elsewhere.state, socket=scene.daemon.socket) as other,
    ):
        _train_and_save(training, ckpt, 1)
        with scene.disk.frozen():
            training.step()
            failed = ckpt.save(2)
            _train_and_save(elsewhere, other, 1)
            with pytest.raises(SaveError, match=r"(?s)no progress for 3 s at \S+/run-.*still there"):
                failed.wait(timeout=60)
            training.step()
            _train_and_save(elsewhere, other, 2)
            again = ckpt.save(3)  # it hangs as well, and holds nobody up
            with pytest.raises(SaveError, match="no progress"):
                again.wait(timeout=60)
            _train_and_save(elsewhere, other, 3)
        _check_closed(scene)
        _train_and_save(training, ckpt, 4)
    _check(scene, [1, 4])
    assert committed(f"file://{tmp_path / 'run'}") == [1, 2, 3]


@pytest.mark.parametrize("name", ["frozen", "failing"])
def test_a_passing_fault_of_the_disk_costs_nothing_but_time(name: str, scene: Scene) -> None:
    """A sync that takes long, and errors that end before the daemon's patience does."""
    training = Training()
    with Checkpointer(scene.url, training.state, keep=Keep(last=5), socket=scene.daemon.socket) as ckpt:
        _train_and_save(training, ckpt, 1)
        with scene.disk.frozen() if name == "frozen" else scene.disk.failing(unseen_by=scene.daemon.pid):
            training.step()
            save = ckpt.save(2)
            with pytest.raises(DeadlineExceeded):
                save.wait(timeout=0.5)
            for _ in range(3):
                training.step()
            assert "write" in [listed["stage"] for listed in _status(scene)["saves"]["listed"]], "the daemon answers"
        save.wait(timeout=60)
        _train_and_save(training, ckpt, 6)
    _check(scene, [1, 2, 6])


def test_r61_what_was_committed_survives_a_real_file_system_that_forgets(scene: Scene) -> None:
    """What the file system has not made durable is gone, at a random moment of a save, and the disk is away then for a
    moment: a save may notice that, and fails."""
    training = Training()
    saves: list[Save] = []
    with Checkpointer(scene.url, training.state, keep=Keep(last=100), socket=scene.daemon.socket) as ckpt:
        _train_and_save(training, ckpt, 1)
        for step in range(2, 5):
            training.step()
            saves.append(ckpt.save(step))
            time.sleep(random.uniform(0, 0.1))
            with scene.disk.failing():
                promised = {1, *(save.step for save in saves if save.state == "committed")}
            assert promised <= set(committed(scene.url))
            _check_good(scene)
        for save in saves:
            with contextlib.suppress(SaveError):
                save.wait(timeout=60)
        _train_and_save(training, ckpt, 5)
    _check(scene, [1, *(save.step for save in saves if save.state == "committed"), 5])


def test_a_folder_deleted_beneath_the_run_is_made_anew(scene: Scene) -> None:
    training = Training()
    with Checkpointer(scene.url, training.state, keep=Keep(last=5), socket=scene.daemon.socket) as ckpt:
        _train_and_save(training, ckpt, 1)
        for folder in ("checkpoints", "manifests"):
            shutil.rmtree(scene.run / folder)
        _train_and_save(training, ckpt, 2)
    _check(scene, [2])


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_r173_what_stands_in_the_place_of_a_shard_is_refused_by_name(kind: str, scene: Scene) -> None:
    training = Training()
    with Checkpointer(scene.url, training.state, socket=scene.daemon.socket) as ckpt:
        _train_and_save(training, ckpt, 1)
    (shard,) = scene.run.glob("checkpoints/*/*.safetensors")
    away = shard.rename(scene.run / "away")
    if kind == "pipe":
        os.mkfifo(shard)
    else:
        shard.symlink_to(away)
    with open_checkpoint(scene.url) as checkpoint, pytest.raises(AccessDenied, match=shard.name) as refused:
        checkpoint[next(iter(checkpoint))].tensor()
    assert kind in refused.value.hint


def _train_and_save(training: Training, ckpt: Checkpointer, step: int) -> None:
    training.step()
    ckpt.save(step).wait(timeout=60)


def _check(scene: Scene, steps: list[int]) -> None:
    """What is committed is good, and nothing else is left."""
    assert committed(scene.url) == steps
    _check_good(scene)
    wait_until(lambda: not list(scene.run.rglob("~*")), "no half file to be left", deadline_seconds=20)
    _check_closed(scene)


def _check_closed(scene: Scene) -> None:
    """After a save that failed, the other ranks are told of it a moment later."""
    wait_until(lambda: not _open_files(scene), "no file to be open", deadline_seconds=30)


def _check_good(scene: Scene) -> None:
    async def bad() -> list[str]:
        async with contextlib.aclosing(open_backend(scene.url)) as backend:
            run = await Run.open(backend)
            found = [await verify(run, version) for version in await run.committed()]
        return [verification.reason for verification in found if not verification.good]

    assert asyncio.run(bad()) == []


def _status(scene: Scene) -> dict[str, Any]:
    return call(scene.daemon.socket, GetStatus(), Status, seconds=10).status


def _open_files(scene: Scene) -> list[str]:
    """Of the daemon, on the disk."""
    return [file.path for file in scene.process.open_files() if file.path.startswith(str(scene.disk.root))]
