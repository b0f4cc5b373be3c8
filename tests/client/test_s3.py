"""The whole way to a real S3 server and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckptd.errors import AccessDenied, CkptdError, NoCheckpoint
from ckptd_client import Checkpointer
from ckptd_client.reader import open_checkpoint
from devtools.seaweedfs import S3Endpoint
from tests.client.conftest import Daemon, Training

Start = Callable[..., Daemon]


def test_saved_to_s3_and_restored_after_everything_was_killed(own_daemon: Start, s3_server: S3Endpoint) -> None:
    daemon, url = own_daemon(), s3_server.prefix()
    training = Training(width=1024)  # its shard goes up in several parts
    options = {"socket": daemon.socket, "storage_options": s3_server.options}
    with Checkpointer(url, training.state, every_steps=1, **options) as ckpt:
        for step in (1, 2, 3):
            training.step()
            save = ckpt.step(step)
            assert save is not None
            save.wait(timeout=60)
        assert save.stats.path.startswith("multipart")
    daemon.kill()
    daemon.start()
    other = Training(width=1024, seed=5)
    with Checkpointer(url, other.state, **options) as ckpt:
        restored = ckpt.restore()
    assert (restored.step, restored.source, restored.generation) == (3, "storage", 2)
    assert all(map(torch.equal, training.parameters(), other.parameters()))
    with open_checkpoint(url, 2, storage_options=s3_server.options) as view:
        assert view["model/0.weight"].shape == (1024, 1024)
        assert view["model/0.weight"][3:5].shape == (2, 1024)


def test_r83_cannot_tell_is_not_nothing(own_daemon: Start, s3_server: S3Endpoint) -> None:
    """Nothing there, the wrong secret, and nobody at home are three answers."""
    daemon = own_daemon()
    state = {"x": torch.ones(3)}
    url = s3_server.prefix()
    with Checkpointer(url, state, socket=daemon.socket, storage_options=s3_server.options) as ckpt:
        with pytest.raises(NoCheckpoint):
            ckpt.restore(required=True)
        assert ckpt.restore().source == "none"
    wrong = {**s3_server.options, "secret_access_key": "not-the-secret"}
    with Checkpointer(url, state, socket=daemon.socket, storage_options=wrong) as ckpt:
        with pytest.raises(AccessDenied) as caught:
            ckpt.restore()
        assert "not-the-secret" not in str(caught.value)
    nobody = {**s3_server.options, "endpoint_url": "http://127.0.0.1:9", "connect_seconds": 0.5}
    with (
        Checkpointer(url, state, socket=daemon.socket, storage_options=nobody) as ckpt,
        pytest.raises(CkptdError, match=r"127\.0\.0\.1:9"),
    ):
        ckpt.restore()
