"""Where it goes: two roots, a real S3 server, racing committers, and a daemon that is killed again and again."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import boto3
import msgspec

from ckptd.arena import SlotState
from ckptd.format.keys import Version, manifest_key
from ckptd.format.records import Manifest, decode
from ckptd.wire.messages import Committed, Failed
from ckptd_backends.local_temporaries import temporary_name
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.daemon.stored import check_committed, manifest, run_folder
from tests.daemon.trainer import DaemonProcess, Member, Trainer, daemon_at, trainer
from tests.servers.fault_proxy import FaultProxy, refuse
from tests.servers.proxied import raw_client


def test_s3_from_the_slot_to_the_manifest(s3_server: S3Endpoint, socket_path: Path) -> None:
    member = Member(s3_server.prefix(), storage_options=s3_server.options)
    size = 11 << 20
    with daemon_at(socket_path) as daemon, trainer(daemon.socket, member, slot_bytes=size + (1 << 20)) as session:
        session.save(3, size)
        outcome = session.outcome(3)
        assert isinstance(outcome, Committed), outcome
        status = msgspec.json.encode(session.status()).decode()
        assert s3_server.secret_access_key not in status + daemon.log.read_text()
        for path in socket_path.parent.rglob("*"):
            assert not path.is_file() or s3_server.secret_access_key.encode() not in path.read_bytes()
    client = boto3.client(  # pyright: ignore[reportUnknownMemberType]
        "s3",
        endpoint_url=s3_server.endpoint_url,
        aws_access_key_id=s3_server.access_key_id,
        aws_secret_access_key=s3_server.secret_access_key,
        region_name=s3_server.region,
    )
    root = member.url.removeprefix(f"s3://{s3_server.bucket}/")

    def stored(key: str) -> bytes:
        return client.get_object(Bucket=s3_server.bucket, Key=f"{root}/{key}")["Body"].read()

    found = decode(stored(manifest_key(Version(3, 1))), Manifest)
    receipt = msgspec.json.decode(stored(found.receipts[0].key))
    assert receipt["shard"]["checksum"].startswith("crc32c:")
    assert stored(receipt["shard"]["key"]) == member.content(3, size).shard
    client.close()


def test_a_full_store_is_cleared_of_what_retention_could_not_delete(s3_server: S3Endpoint, socket_path: Path) -> None:
    with FaultProxy(s3_server) as proxy, raw_client(s3_server) as client:
        member = Member(s3_server.prefix(), keep_last=1, storage_options=proxy.options)
        manifests = member.url.removeprefix(f"s3://{s3_server.bucket}/") + "/manifests/"

        def committed() -> list[str]:
            found = client.list_objects_v2(Bucket=s3_server.bucket, Prefix=manifests).get("Contents", [])
            return [entry["Key"].removeprefix(manifests) for entry in found]

        with daemon_at(socket_path) as daemon, trainer(daemon.socket, member) as session:
            session.save(1)
            assert isinstance(session.outcome(1), Committed)
            full = refuse(507, "InsufficientStorage")
            proxy.fault("PutObject", full, times=99, when=lambda exchange: "tombstones/" in exchange.target)
            session.save(2)
            assert isinstance(session.outcome(2), Committed)
            wait_until(lambda: "stays for now" in daemon.log.read_text(), "a deletion to fail", deadline_seconds=10)
            assert len(committed()) == 2
            proxy.forget()
            # No commit will come that could bring retention back, until there is room again.
            proxy.fault("*", full, when=lambda exchange: ".safetensors" in exchange.target)
            session.save(3)
            assert isinstance(session.outcome(3), Failed)
            wait_until(lambda: committed() == ["000000000002-g000001.json"], "retention", deadline_seconds=10)


def test_racing_committers_write_the_same(socket_path: Path, tmp_run: str) -> None:
    eager = ("--commit-takeover", "0")
    first, second = (socket_path.with_name(f"d{number}.sock") for number in (0, 1))
    with (
        daemon_at(first, *eager),
        daemon_at(second, *eager),
        trainer(first, Member(tmp_run, rank=0, world=2)) as zero,
        trainer(second, Member(tmp_run, rank=1, world=2)) as one,
    ):
        for step in range(1, 6):
            one.save(step)
            zero.save(step)
            assert isinstance(zero.outcome(step), Committed)
            assert isinstance(one.outcome(step), Committed)
            check_committed(zero.member, step)


def test_a_daemon_killed_again_and_again_loses_nothing(socket_path: Path, tmp_run: str) -> None:
    """P1 and P3: at whatever byte it dies, storage has the old or the new, and what is sealed gets there."""
    member = Member(tmp_run, storage_options={"part_bytes": 65536})
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemon_at(socket_path))
        session = stack.enter_context(trainer(socket_path, member))
        arena = session.arena
        assert arena is not None
        for step in range(1, 7):
            at = session.save(step)
            time.sleep(random.uniform(0, 0.04))
            daemon.kill()
            assert arena.record(at.slot).state in (SlotState.SEALED, SlotState.DURABLE)
            if manifest(tmp_run, Version(step, 1)) is not None:
                check_committed(member, step)
            daemon = stack.enter_context(daemon_at(socket_path))
            session = Trainer(socket_path, member)
            stack.callback(session.close)
            session.hello()
            session.hand_arena(arena)
            assert isinstance(session.outcome(step), Committed)
            for earlier in range(1, step):
                assert manifest(tmp_run, Version(earlier, 1)) is not None
        # What the killed ones were writing is swept when the next one opens the store.
        wait_until(lambda: not any(run_folder(tmp_run).rglob("~*")), "the sweep", deadline_seconds=10)


def test_what_a_killed_trainer_was_writing_goes_when_the_next_one_comes(daemon: DaemonProcess, tmp_run: str) -> None:
    """Also where the daemon has the store open all the time."""
    with trainer(daemon.socket, Member(tmp_run, world=2), slots=0):
        left = run_folder(tmp_run) / "generations" / temporary_name()
        left.parent.mkdir(exist_ok=True)
        left.write_bytes(b"half of")
        with trainer(daemon.socket, Member(tmp_run, rank=1, world=2), slots=0):
            wait_until(lambda: not left.exists(), "the sweep", deadline_seconds=60)
