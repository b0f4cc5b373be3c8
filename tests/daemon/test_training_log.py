"""The daemon stores what trainers have logged, whoever is killed, and loses nothing in silence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.training_log import TrainingLog, read_log
from ckptd.daemon.training_log import TrainingLogs
from ckptd.errors import AlreadyExists, ProtocolError
from ckptd.format.keys import LOG, generation_key
from ckptd.format.records import Parent, encode
from ckptd.limits import LOG_RING_ROWS, LOG_SEGMENT_ROWS_MAX
from ckptd.pulse import Pulse
from ckptd.storage import open_backend
from ckptd.wire.messages import HandWatched
from devtools.processes import spawn, wait_until
from devtools.seaweedfs import S3Endpoint
from tests.daemon.member import Member
from tests.daemon.stored import run_folder
from tests.daemon.trainer import DaemonProcess, Trainer, daemon_at, trainer

SELDOM = ("--log-write", "3600")
"""Only where there is a reason."""


@contextlib.contextmanager
def logging(daemon: DaemonProcess, member: Member) -> Generator[tuple[Trainer, Pulse]]:
    """A trainer whose generation is on record in all tiers, and its pulse."""

    async def put(url: str, options: dict[str, Any]) -> None:
        async with contextlib.aclosing(open_backend(url, options)) as backend:
            with contextlib.suppress(AlreadyExists):
                await backend.put(generation_key(member.generation), encode(member.record), if_absent=True)

    for tier in member.tiers:
        asyncio.run(put(tier.url, tier.storage_options))
    with trainer(daemon.socket, member) as session:
        pulse = session.watched()
        pulse.opened(member.generation)
        yield session, pulse


def report(pulse: Pulse, steps: range) -> None:
    for step in steps:
        seconds = pulse.step(step)
        pulse.log(step, {"loss": 100.0 / step, "tokens": 10.0 * step}, unix_seconds=1.8e9, step_seconds=seconds)


def logged(url: str, options: dict[str, Any] | None = None) -> TrainingLog:
    async def read() -> TrainingLog:
        async with contextlib.aclosing(open_backend(url, options)) as backend:
            return await read_log(await Run.open(backend))

    return asyncio.run(read())


def wait_for_steps(url: str, steps: range, options: dict[str, Any] | None = None) -> TrainingLog:
    """Until just these are there."""
    wait_until(
        lambda: [row.step for row in logged(url, options)] == list(steps),
        f"the log of {steps}",
        deadline_seconds=30,
        every_seconds=0.2,
    )
    found = logged(url, options)
    assert all(row.values == {"loss": 100.0 / row.step, "tokens": 10.0 * row.step} for row in found)
    assert (found.notes, dict(found.missing)) == ((), {})
    return found


def segments(url: str) -> list[str]:
    return sorted(path.name for path in run_folder(url).glob(f"{LOG}*/*.json"))


def log_of(daemon: Trainer, rank: int = 0) -> dict[str, Any]:
    return next(life for life in daemon.status()["logs"]["listed"] if life["rank"] == rank)


VICTIM = """
import json, os, signal, sys, time
import msgspec
from ckptd.pulse import Pulse
from tests.daemon.member import Member
from tests.daemon.test_training_log import report
from tests.daemon.trainer import trainer
config = json.loads(sys.argv[1])
with trainer(config["socket"], msgspec.convert(config["member"], Member), slots=0) as session:
    pulse = session.watched()
    pulse.opened(config["member"]["generation"])
    session.status()  # all of it has been taken
    report(pulse, range(1, config["steps"] + 1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(daemon: DaemonProcess, member: Member, steps: int) -> None:
    """Have a trainer log so many steps, and die in the middle of what it is doing."""
    with logging(daemon, replace(member, rank=1, world=2)):
        pass  # the generation is on record
    config = {"socket": str(daemon.socket), "member": _plain(member), "steps": steps}
    victim = spawn([sys.executable, "-c", VICTIM, json.dumps(config)], output=subprocess.PIPE)
    output = victim.communicate(timeout=60)[0]
    assert victim.returncode == -signal.SIGKILL, output


def test_a_killed_trainer_has_logged_every_step(socket_path: Path, tmp_run: str) -> None:
    with daemon_at(socket_path, *SELDOM) as daemon:
        killed(daemon, Member(tmp_run), 3000)
        found = wait_for_steps(tmp_run, range(1, 3001))
    assert next(iter(found)).step_seconds is None
    assert all((row.step_seconds or 0) >= 0 for row in found)
    assert len(segments(tmp_run)) == -(-3000 // LOG_SEGMENT_ROWS_MAX)


def test_a_killed_trainer_has_logged_every_step_on_s3(socket_path: Path, s3_server: S3Endpoint) -> None:
    member = Member(s3_server.prefix(), storage_options=s3_server.options)
    with daemon_at(socket_path, *SELDOM) as daemon:
        killed(daemon, member, 1500)
        wait_for_steps(member.url, range(1, 1501), member.storage_options)


def _plain(member: Member) -> dict[str, Any]:
    return {"url": member.url, "generation": member.generation, "storage_options": member.storage_options}


def test_it_is_stored_at_a_commit_at_intervals_and_at_the_end(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run)
    with daemon_at(socket_path, *SELDOM) as daemon, logging(daemon, member) as (session, pulse):
        report(pulse, range(1, 11))
        session.durable(session.save(10))
        wait_for_steps(tmp_run, range(1, 11))
        report(pulse, range(11, 16))
        session.durable(session.save(15))
        wait_for_steps(tmp_run, range(1, 16))
        wait_until(lambda: len(segments(tmp_run)) == 1, "the shorter one to go", deadline_seconds=20)
        report(pulse, range(16, 21))
        assert daemon.terminate() == 0  # a drain
        wait_for_steps(tmp_run, range(1, 21))
    with (
        daemon_at(socket_path, "--log-write", "0.1") as daemon,
        logging(daemon, replace(member, generation=2)) as (
            session,
            pulse,
        ),
    ):
        report(pulse, range(21, 25))
        wait_until(lambda: len(logged(tmp_run)) == 24, "an interval", deadline_seconds=20)


def test_a_new_daemon_goes_on_where_the_killed_one_was(socket_path: Path, tmp_run: str) -> None:
    """What the old one had not stored lies in the trainer's memory still."""
    member = Member(tmp_run)
    with daemon_at(socket_path, *SELDOM) as daemon, logging(daemon, member) as (session, pulse):
        report(pulse, range(1, 101))
        session.durable(session.save(100))
        wait_for_steps(tmp_run, range(1, 101))
        report(pulse, range(101, 201))
        wait_until(lambda: log_of(session)["rows"] == 200, "all to be read", deadline_seconds=20)
        daemon.kill()
        report(pulse, range(201, 251))
        with daemon_at(socket_path, *SELDOM) as second, contextlib.closing(Trainer(second.socket, member)) as again:
            again.hello()
            for part, fd in pulse.parts():
                again.tell(HandWatched(part=part, signal=pulse.dump_signal), fd)
            wait_until(lambda: log_of(again)["rows"] == 250, "the rows", deadline_seconds=20)
            report(pulse, range(251, 261))
            again.close()
            wait_for_steps(tmp_run, range(1, 261))


def test_what_the_memory_has_lost_is_counted_and_seen(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run)
    steps = 2 * LOG_RING_ROWS
    with daemon_at(socket_path, *SELDOM) as daemon, logging(daemon, member) as (session, pulse):
        session.status()
        daemon.process.send_signal(signal.SIGSTOP)  # stopped, for longer than the ring lasts
        report(pulse, range(1, steps + 1))
        daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda: log_of(session)["rows"] == steps, "the newest", deadline_seconds=20)
        session.durable(session.save(steps))
        wait_until(lambda: log_of(session)["tiers"][0]["stored"] == steps, "the store", deadline_seconds=20)
        lost = log_of(session)["tiers"][0]["lost"]
        assert lost >= LOG_RING_ROWS
        found = logged(tmp_run)
        assert dict(found.missing) == {1: lost}
        assert [row.step for row in found][-1] == steps
        assert len(found) == steps - lost


def test_every_tier_gets_it_and_one_that_is_down_gets_it_later(socket_path: Path, tmp_path: Path) -> None:
    member = Member(f"file://{tmp_path / 'near'}", far_url=f"file://{tmp_path / 'far'}")
    with daemon_at(socket_path, "--log-write", "0.2") as daemon, logging(daemon, member) as (session, pulse):
        (tmp_path / "far").rename(tmp_path / "away")
        (tmp_path / "far").write_text("no folder")
        report(pulse, range(1, 21))
        wait_for_steps(member.url, range(1, 21))
        wait_until(lambda: log_of(session)["tiers"][1]["failures"] > 1, "a failure", deadline_seconds=20)
        assert log_of(session)["tiers"][1]["error"]
        (tmp_path / "far").unlink()
        (tmp_path / "away").rename(tmp_path / "far")
        report(pulse, range(21, 31))
        wait_for_steps(member.far_url, range(1, 31))
        assert log_of(session)["tiers"][1] == {
            "tier": member.far_url,
            "stored": 30,
            "lost": 0,
            "failures": 0,
            "error": "",
        }


def test_nothing_is_written_where_the_run_has_gone(socket_path: Path, tmp_run: str) -> None:
    member = Member(tmp_run)
    with daemon_at(socket_path, "--log-write", "0.1") as daemon, logging(daemon, member) as (session, pulse):
        (run_folder(tmp_run) / "run.json").unlink()
        report(pulse, range(1, 11))
        wait_until(lambda: log_of(session)["tiers"][0]["failures"] > 1, "a refusal", deadline_seconds=20)
        assert "run.json is missing" in log_of(session)["tiers"][0]["error"]
        assert segments(tmp_run) == []


def test_rolled_back_steps_are_marked(socket_path: Path, tmp_run: str) -> None:
    first = Member(tmp_run)
    second = replace(first, generation=2, parent=Parent(generation=1, step=6))
    with daemon_at(socket_path, *SELDOM) as daemon:
        with logging(daemon, first) as (_, pulse):
            report(pulse, range(1, 11))
        with logging(daemon, second) as (_, pulse):
            report(pulse, range(7, 9))
        wait_until(lambda: len(logged(tmp_run)) == 12, "both", deadline_seconds=20)
    assert [(row.generation, row.step) for row in logged(tmp_run) if row.rolled_back] == [
        (1, step) for step in range(7, 11)
    ]


def test_what_is_no_memory_for_rows_is_refused_and_closed() -> None:
    logs = TrainingLogs(_unused, _unused, _unused, 1.0)
    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
        with pytest.raises(ProtocolError, match="handed in as rows"):
            logs.take(object(), fd)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def _unused(*_: object) -> Any:
    raise AssertionError
