"""Tiers as a training loop sees them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import CkptdError, ConfigError, UsageError
from ckptd_client import Checkpointer, Keep, Tier
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint, SeaweedFS
from tests.client.conftest import Daemon, Training, committed
from tests.servers.proxied import raw_client

Start = Callable[..., Daemon]


def places(folder: Path) -> tuple[str, str]:
    return f"file://{folder / 'near'}", f"file://{folder / 'far'}"


def train(url: Any, training: Training, first: int, last: int, **options: Any) -> None:
    """Save each step, restore before the first."""
    with Checkpointer(url, training.state, every_steps=1, **options) as ckpt:
        ckpt.restore()
        for step in range(first, last + 1):
            training.step()
            save = ckpt.step(step)
            assert save is not None
            save.wait(timeout=60)


def rot(url: str, step: int) -> None:
    (shard,) = Path(url.removeprefix("file://")).glob(f"checkpoints/{step:012d}-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_a_lost_disk_restores_from_the_next_tier_and_is_the_runs_again(own_daemon: Start, tmp_path: Path) -> None:
    daemon, (near, far), training = own_daemon(), places(tmp_path), Training()
    train([near, Tier(far, keep=Keep(last=2))], training, 1, 3, socket=daemon.socket, keep=Keep(last=50))
    wait_until(lambda: 3 in committed(far), "the newest copy", deadline_seconds=20)
    daemon.kill()
    shutil.rmtree(tmp_path / "near")
    daemon.start()
    other = Training(seed=9)
    with Checkpointer([near, far], other.state, socket=daemon.socket) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.source, restored.tier, restored.generation) == (3, "storage", far, 2)
        assert any(notice.startswith(f"{near} was passed over") for notice in restored.report.notices)
        assert all(map(torch.equal, training.parameters(), other.parameters()))
        ckpt.save(4).wait(timeout=60)
        wait_until(lambda: 4 in committed(far), "the copy", deadline_seconds=20)
    assert committed(near) == [4]
    folders = [Path(url.removeprefix("file://")) for url in (near, far)]
    assert len({(folder / "run.json").read_bytes() for folder in folders}) == 1
    assert list(folders[1].glob("marks/000000000003-g000001/verified-*"))


def test_rot_on_the_nearest_tier_is_passed_over_for_the_same_step_further_out(
    own_daemon: Start, tmp_path: Path
) -> None:
    daemon, (near, far), training = own_daemon(), places(tmp_path), Training()
    train([near, far], training, 1, 2, socket=daemon.socket)
    wait_until(lambda: 2 in committed(far), "the copy", deadline_seconds=20)
    daemon.kill()
    rot(near, 2)
    daemon.start()
    with Checkpointer([near, far], training.state, socket=daemon.socket) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.tier) == (2, far)
        assert any("differ from their digest" in notice for notice in restored.report.notices)
    # Where it is rotten in both, the step before is taken, from the nearest that has it.
    daemon.kill()
    rot(far, 2)
    daemon.start()
    with Checkpointer([near, far], training.state, socket=daemon.socket) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.tier) == (1, near)


def test_a_tier_that_does_not_answer(
    own_daemon: Start, own_s3_server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops no training and no restart of the launch; but who comes anew may not take what is near for all."""
    monkeypatch.setattr("ckptd.checkpoint.tiers.TIER_ANSWER_SECONDS", 1.0)  # asked seven times
    daemon, training = own_daemon(), Training()
    near = places(tmp_path)[0]
    quick = {"no_progress_seconds": 1.0, "connect_seconds": 1.0, "part_deadline_seconds": 2.0}
    tiers = [near, Tier(own_s3_server.prefix(), storage_options={**own_s3_server.options, **quick})]
    train(tiers, training, 1, 1, socket=daemon.socket, launch="job#0")
    own_s3_server.kill()
    train(tiers, training, 2, 2, socket=daemon.socket, launch="job#1")
    assert committed(near) == [1, 2]
    daemon.kill()
    daemon.start()
    with Checkpointer(tiers, training.state, socket=daemon.socket, launch="job#2") as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.source, restored.tier) == (2, "storage", near)
    daemon.kill()
    daemon.start()
    with (
        pytest.raises(CkptdError, match="may hold newer checkpoints"),
        Checkpointer(tiers, training.state, socket=daemon.socket, launch="another") as ckpt,
    ):
        ckpt.restore()


def test_s3_as_the_further_tier(own_daemon: Start, s3_server: S3Endpoint, tmp_path: Path) -> None:
    daemon, training = own_daemon(), Training(width=1024)
    near, far = places(tmp_path)[0], Tier(s3_server.prefix(), storage_options=s3_server.options)
    train([near, far], training, 1, 2, socket=daemon.socket)
    with raw_client(s3_server) as client:
        bucket, _, prefix = far.url.removeprefix("s3://").partition("/")
        listed = {"Bucket": bucket, "Prefix": f"{prefix}/manifests/000000000002-"}
        wait_until(lambda: client.list_objects_v2(**listed)["KeyCount"] == 1, "the copy", deadline_seconds=30)
    daemon.kill()
    shutil.rmtree(tmp_path / "near")
    daemon.start()
    other = Training(width=1024, seed=3)
    with Checkpointer([near, far], other.state, socket=daemon.socket) as ckpt:
        restored = ckpt.restore()
    assert (restored.step, restored.tier) == (2, far.url)
    assert all(map(torch.equal, training.parameters(), other.parameters()))


def test_a_run_of_another_tier_is_refused(own_daemon: Start, tmp_path: Path) -> None:
    daemon, training = own_daemon(), Training()
    first, second = places(tmp_path)
    train(first, training, 1, 1, socket=daemon.socket)
    train(second, training, 1, 1, socket=daemon.socket)
    with (
        pytest.raises(ConfigError, match="of different runs"),
        Checkpointer([first, second], training.state, socket=daemon.socket) as ckpt,
    ):
        ckpt.restore()


def test_a_further_tier_added_later_is_filled(own_daemon: Start, tmp_path: Path) -> None:
    daemon, (near, far), training = own_daemon(), places(tmp_path), Training()
    train(near, training, 1, 2, socket=daemon.socket)
    with Checkpointer([near, far], training.state, socket=daemon.socket) as ckpt:
        ckpt.restore()
        wait_until(lambda: committed(far) == [2], "the copy", deadline_seconds=20)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ([], {}, "0 tiers"),
        (["/tmp/a", "/tmp/a/"], {}, "one root"),
        ([Tier("/tmp/a", every_steps=3), "/tmp/b"], {}, "nearest"),
        (["/tmp/a", Tier("/tmp/b", every_steps=0)], {}, "not positive"),
        (["/tmp/a", Tier("/tmp/b", every=-1.0)], {}, "not positive"),
        (["/tmp/a", "/tmp/b"], {"storage_options": {"part_bytes": 4096}}, "several tiers"),
        ([Tier("/tmp/a", keep=Keep(last=1))], {"keep": Keep(last=2)}, "twice"),
    ],
)
def test_what_makes_no_sense_is_refused(url: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Checkpointer(url, {"x": torch.zeros(1)}, **options)


def test_the_node_stands_for_itself(own_daemon: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, training = own_daemon(), Training()
    monkeypatch.setenv("CKPTD_NODE", "rack 3/a")
    train(f"file://{tmp_path}/{{node}}/run", training, 1, 1, socket=daemon.socket)
    assert committed(f"file://{tmp_path}/rack-3-a/run") == [1]
    assert "secret" not in repr(Tier("s3://b/p", storage_options={"secret_access_key": "secret"}))
