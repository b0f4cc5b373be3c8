"""A training whose object store goes wrong under it: a real trainer, a real daemon, a real server, and what happens
between them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from ckptd.cli.daemon_call import call
from ckptd.errors import AccessDenied, SaveError, SaveSkipped
from ckptd.wire.messages import GetStatus, Status
from ckptd_client import Checkpointer, Keep
from ckptd_client.save import Save
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.client.conftest import Daemon, Training
from tests.servers import fault_proxy as faults
from tests.servers.fault_proxy import FaultProxy, refuse
from tests.servers.proxied import open_uploads, raw_client

Start = Callable[..., Daemon]
FOR_EVER = 10**9


@pytest.fixture
def proxy(s3_server: S3Endpoint) -> Iterator[FaultProxy]:
    """In front of the suite's S3 server."""
    with FaultProxy(s3_server) as proxy:
        yield proxy


def is_shard(seen: faults.Exchange) -> bool:
    return ".safetensors" in seen.target


def train(ckpt: Checkpointer, training: Training, steps: range) -> list[Save]:
    """Handles of the saves, one for each step."""
    saves: list[Save] = []
    for step in steps:
        training.step()
        save = ckpt.step(step)
        assert save is not None
        saves.append(save)
    return saves


@pytest.mark.parametrize("on_full", ["wait", pytest.param("fail", marks=pytest.mark.long)])
def test_r92_training_goes_on_while_the_store_is_silent_for_ten_saves(
    daemon: Daemon, proxy: FaultProxy, on_full: Any
) -> None:
    """Two saves hold the two slots and wait for the store; the others are let go as asked for. Then it answers."""
    training, url = Training(width=256), proxy.server.prefix()
    slot_bytes = 3 * sum(parameter.numel() * 4 for parameter in training.model.parameters())
    options: dict[str, Any] = {"socket": daemon.socket, "storage_options": proxy.options, "max_wait": 0.05}
    with Checkpointer(url, training.state, every_steps=1, on_full=on_full, **options) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            train(ckpt, training, range(step, step + 1))[0].wait(timeout=60)
        process = psutil.Process(ckpt.daemon_pid)
        before = process.memory_info().rss
        proxy.fault("*", faults.silent, times=FOR_EVER)
        silenced = train(ckpt, training, range(4, 14))
        assert len(training.losses) == 13
        let_go = [save for save in silenced if save.state == "failed"]
        assert len(let_go) == 8
        expected = SaveError if on_full == "fail" else SaveSkipped
        assert {type(save.error) for save in let_go} == {expected}
        assert "slot" in str(let_go[0].error)
        assert process.memory_info().rss - before < 4 * slot_bytes + (32 << 20)
        proxy.forget()
        for save in silenced:
            if save not in let_go:
                save.wait(timeout=60)  # the store took its time, and nothing was lost
        (after,) = train(ckpt, training, range(14, 15))
        after.wait(timeout=60)


def test_r107_a_save_that_fails_says_what_and_where_and_the_next_one_works(daemon: Daemon, proxy: FaultProxy) -> None:
    training, url = Training(), proxy.server.prefix()
    with Checkpointer(url, training.state, every_steps=1, socket=daemon.socket, storage_options=proxy.options) as ckpt:
        for fault, words in (
            (refuse(403, "AccessDenied"), ("AccessDenied (403)", "allow s3:PutObject")),
            (refuse(403, "InvalidAccessKeyId"), ("InvalidAccessKeyId", "ckptd drain")),
            (refuse(507, "InsufficientStorage"), ("InsufficientStorage", "make room")),
        ):
            step = len(training.losses) + 1
            proxy.fault("PutObject", fault, when=is_shard)
            (failed,) = train(ckpt, training, range(step, step + 1))
            with pytest.raises(Exception, match=url) as caught:
                failed.wait(timeout=60)
            assert all(word in str(caught.value) for word in (*words, ".safetensors", f"{step:012d}"))
            assert proxy.server.secret_access_key not in str(caught.value)
            (works,) = train(ckpt, training, range(step + 1, step + 2))
            works.wait(timeout=60)
    assert proxy.unmet() == []


def test_r91_every_answer_of_a_save_may_be_lost(daemon: Daemon, proxy: FaultProxy) -> None:
    """Of the shard, of the receipt, of the manifest: the effect is there, and the retry hears 412, or first 409."""
    training = Training()
    conflict = refuse(409, "ConditionalRequestConflict")
    with Checkpointer(
        proxy.server.prefix(), training.state, every_steps=1, socket=daemon.socket, storage_options=proxy.options
    ) as ckpt:
        ckpt.restore()
        for part in (".safetensors", "-of-00001.json", "/manifests/"):

            def of_this_kind(seen: faults.Exchange, part: str = part) -> bool:
                return part in seen.target

            lost = faults.one_after_another(faults.lose_answer, conflict)
            proxy.fault("PutObject", lost, times=2, when=of_this_kind)
        (save,) = train(ckpt, training, range(1, 2))
        save.wait(timeout=60)
        assert proxy.unmet() == []


def test_restore_reads_again_what_was_damaged_on_the_way_and_falls_back_from_what_is_not_sound(
    daemon: Daemon, own_daemon: Start, proxy: FaultProxy
) -> None:
    training, url = Training(), proxy.server.prefix()
    options: dict[str, Any] = {"socket": daemon.socket, "storage_options": proxy.options}
    with Checkpointer(url, training.state, every_steps=1, **options) as ckpt:
        ckpt.restore()
        for save in train(ckpt, training, range(1, 4)):
            save.wait(timeout=60)

    def flip(exchange: faults.Exchange) -> None:
        answer = exchange.pass_on()
        middle = len(answer.body) // 2
        damaged = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
        exchange.reply(faults.Answer(answer.status, answer.headers, damaged))

    def of_step_3(seen: faults.Exchange) -> bool:
        return is_shard(seen) and "000000000003-" in seen.target

    away = own_daemon()  # it has no snapshots in memory
    for times, step in ((1, 3), (FOR_EVER, 2)):
        proxy.forget()
        proxy.fault("GetObject", faults.truncate(100), when=is_shard)
        proxy.fault("GetObject", refuse(503, "SlowDown"), times=3)
        proxy.fault("GetObject", flip, times=times, when=of_step_3)
        with Checkpointer(url, Training(seed=step).state, **options | {"socket": away.socket}) as again:
            restored = again.restore()
        assert (restored.step, restored.source) == (step, "storage")
        said = [notice for notice in restored.report.notices if "digest" in notice]
        assert (step == 2) == any("000000000003" in notice for notice in said)


def test_access_denied_to_the_run_names_bucket_key_and_permission(daemon: Daemon, proxy: FaultProxy) -> None:
    url = proxy.server.prefix()
    proxy.fault("GetObject", refuse(403, "AccessDenied"), times=FOR_EVER)
    with (
        Checkpointer(url, Training().state, socket=daemon.socket, storage_options=proxy.options) as ckpt,
        pytest.raises(AccessDenied) as refused,
    ):
        ckpt.restore()
    assert f"{url}/run.json: AccessDenied (403)" in str(refused.value)
    assert "allow s3:GetObject" in str(refused.value)


def test_r97_uploads_of_a_killed_daemon_are_aborted_by_the_next(own_daemon: Start, proxy: FaultProxy) -> None:
    """SIGKILL in the middle of a multipart upload; the trainer hands its memory to the next daemon."""
    daemon, training, url = own_daemon(), Training(width=800), proxy.server.prefix()
    with Checkpointer(
        url, training.state, every_steps=1, socket=daemon.socket, storage_options=proxy.options, start_daemon=False
    ) as ckpt:
        ckpt.restore()
        proxy.fault("UploadPart", faults.silent, times=FOR_EVER)
        (save,) = train(ckpt, training, range(1, 2))
        wait_until(lambda: proxy.count("UploadPart") > 0, "an upload", deadline_seconds=30)
        daemon.kill()
        assert len(open_uploads(proxy.server, url)) == 1
        proxy.forget()
        daemon.start()
        save.wait(timeout=60)
        wait_until(lambda: open_uploads(proxy.server, url) == [], "the abort", deadline_seconds=30)


def test_credentials_of_a_trainer_do_not_reach_a_daemon_that_runs(
    own_daemon: Start, s3_server: S3Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = own_daemon()
    for name, value in s3_server.environment.items():
        if "KEY" in name:
            monkeypatch.setenv(name, value)
    options = {"endpoint_url": s3_server.endpoint_url, "region": s3_server.region}
    training = Training()
    with Checkpointer(
        s3_server.prefix(), training.state, every_steps=1, socket=daemon.socket, storage_options=options
    ) as ckpt:
        ckpt.restore()
        (save,) = train(ckpt, training, range(1, 2))
        with pytest.raises(SaveError if save.error else Exception, match="no usable credentials") as refused:
            save.wait(timeout=60)
        for words in (f"process {daemon.pid}", "storage_options", "ckptd drain"):
            assert words in str(refused.value)
        with pytest.raises(Exception, match="credentials"):
            ckpt.close()


def test_no_secret_is_to_be_seen_anywhere(
    own_daemon: Start, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in what is stored, logged, told, nor in the list of processes: with faults that make it talk."""
    caplog.set_level("DEBUG", logger="ckptd")
    daemon, training, url = own_daemon(), Training(), proxy.server.prefix()
    secret = proxy.server.secret_access_key
    with Checkpointer(
        url,
        training.state,
        every_steps=1,
        keep=Keep(last=1),
        socket=daemon.socket,
        storage_options={**proxy.options, "session_token": None},
    ) as ckpt:
        ckpt.restore()
        proxy.fault("PutObject", refuse(503, "SlowDown"), when=is_shard)
        proxy.fault("PutObject", refuse(403, "SignatureDoesNotMatch"), when=lambda seen: "/manifests/" in seen.target)
        saves = train(ckpt, training, range(1, 3))
        with pytest.raises(Exception, match="SignatureDoesNotMatch") as refused:
            saves[0].wait(timeout=60)
        saves[1].wait(timeout=60)
        status = json.dumps(call(daemon.socket, GetStatus(), Status, seconds=20).status)
        told = [str(refused.value), repr(refused.value), caplog.text, daemon.log.read_text(), status]
        told += [" ".join(process.cmdline()) for process in (psutil.Process(), psutil.Process(ckpt.daemon_pid))]
    with raw_client(proxy.server) as client:
        prefix = url.removeprefix(f"s3://{proxy.server.bucket}/")
        for entry in client.list_objects_v2(Bucket=proxy.server.bucket, Prefix=prefix)["Contents"]:
            with contextlib.suppress(client.exceptions.NoSuchKey):  # the daemon still removes what it needed
                stored = client.get_object(Bucket=proxy.server.bucket, Key=entry["Key"])["Body"].read()
                told.append(stored.decode("latin-1"))
    assert "SlowDown" in daemon.log.read_text()
    assert [text[:200] for text in told if secret in text] == []
