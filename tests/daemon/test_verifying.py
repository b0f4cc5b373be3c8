"""The daemon reads commits again, and says what it found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.standing import Standing
from ckptd.errors import ConfigError
from ckptd.format.keys import Version, generation_key
from ckptd.format.records import encode
from ckptd.storage import open_backend
from ckptd.wire.messages import Committed
from devtools.processes import wait_until
from tests.daemon.member import Member
from tests.daemon.stored import run_folder
from tests.daemon.trainer import DaemonProcess, Trainer, daemon_at, trainer

EAGER = ("--verify-bandwidth", "1000", "--verify-delay", "0")
LOADERS = """
import pathlib

def good(url, checkpoint, options):
    with open("loaded", "a") as file:
        print(checkpoint, file=file)

def bad(url, checkpoint, options):
    raise ValueError("another model")
"""


@pytest.fixture
def eager(socket_path: Path) -> Iterator[DaemonProcess]:
    """Verifies at once."""
    with daemon_at(socket_path, *EAGER) as daemon:
        yield daemon


@contextlib.contextmanager
def training(daemon: DaemonProcess, member: Member) -> Generator[Trainer]:
    """A trainer whose generation is on record."""

    async def put() -> None:
        await open_backend(member.url).put(generation_key(member.generation), encode(member.record))

    asyncio.run(put())
    with trainer(daemon.socket, member) as session:
        yield session


def standings(url: str) -> dict[Version, Standing]:
    async def read() -> dict[Version, Standing]:
        return await (await Run.open(open_backend(url))).standings()

    return asyncio.run(read())


def counts(session: Trainer) -> dict[str, Any]:
    return cast(dict[str, Any], session.status()["counts"])


def test_a_commit_is_read_again_and_marked(eager: DaemonProcess, tmp_run: str) -> None:
    with training(eager, Member(tmp_run)) as session:
        session.save(10)
        session.outcome(10)
        wait_until(lambda: counts(session).get("verified") == 1, "the verdict", deadline_seconds=20)
        assert standings(tmp_run) == {Version(10, 1): Standing(verified=True)}
        wait_until(lambda: session.status()["verifying"] is None, "the end of it", deadline_seconds=20)
        assert list(run_folder(tmp_run).glob("leases/*")) == []


def test_damage_is_found_marked_and_shown(socket_path: Path, tmp_run: str) -> None:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemon_at(socket_path, *EAGER, "--verify-delay", "1"))
        session = stack.enter_context(training(daemon, Member(tmp_run)))
        session.save(10)
        session.outcome(10)
        (shard,) = run_folder(tmp_run).glob("checkpoints/*/*.safetensors")
        with shard.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 1]))
        wait_until(lambda: counts(session).get("suspect") == 1, "the verdict", deadline_seconds=20)
        assert standings(tmp_run) == {Version(10, 1): Standing(suspect=True)}
        (failure,) = session.status()["failures"]
        assert failure["stage"] == "verify"
        assert "differ from their digest" in failure["error"]
        session.save(20)
        assert isinstance(session.outcome(20), Committed)  # training goes on


@pytest.mark.parametrize("function", ["good", "bad", "missing"])
def test_of_so_many_commits_one_is_loaded(eager: DaemonProcess, tmp_run: str, tmp_path: Path, function: str) -> None:
    folder = tmp_path / "loaders"
    folder.mkdir()
    (folder / "loaders.py").write_text(LOADERS)
    loader = {"function": f"loaders:{function}", "folder": str(folder), "path": [str(folder)]}
    member = Member(tmp_run, loader=loader, load_every=2)
    with training(eager, member) as session:
        for number, step in enumerate((10, 20, 30), 1):
            session.save(step)
            session.outcome(step)
            wait_until(
                lambda number=number: sum(counts(session).get(kind, 0) for kind in ("verified", "suspect")) == number,  # type: ignore[misc]
                "the verdict",
                deadline_seconds=30,
            )
        found = [standings(tmp_run)[Version(step, 1)] for step in (10, 20, 30)]
        suspect = Standing(suspect=True) if function == "bad" else Standing(verified=True)
        assert found == [Standing(verified=True), suspect, Standing(verified=True)]
        failures = [failure["error"] for failure in session.status()["failures"]]
        if function == "good":
            assert (folder / "loaded").read_text() == "20-g1\n"
            assert failures == []
        else:
            assert len(failures) == 1
            assert ("another model" if function == "bad" else "was not begun") in failures[0]


def test_each_node_verifies_what_its_own_disk_holds(socket_path: Path, tmp_path: Path) -> None:
    """One of two disks rots before it is read again: there the checkpoint is suspect, and nowhere else."""
    shared = f"file://{tmp_path / 'shared'}"
    members = [
        Member(f"file://{tmp_path / f'disk{rank}'}", far_url=shared, world=2, shared=False, rank=rank)
        for rank in range(2)
    ]
    with contextlib.ExitStack() as stack:
        sessions: list[Trainer] = []
        for member in members:
            socket = socket_path.with_name(f"{member.rank}.sock")
            daemon = stack.enter_context(daemon_at(socket, *EAGER, "--verify-delay", "3"))
            sessions.append(stack.enter_context(training(daemon, member)))
        for session in sessions:
            session.save(10)
        for session in sessions:
            assert isinstance(session.outcome(10), Committed)
        wait_until((run_folder(shared) / f"manifests/{Version(10, 1)}.json").exists, "the copy", deadline_seconds=20)
        (shard,) = run_folder(members[1].url).glob("checkpoints/*/*.safetensors")
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.chmod(0o644)
        shard.write_bytes(data)
        wait_until(lambda: counts(sessions[0]).get("verified") == 2, "two verdicts", deadline_seconds=40)
        wait_until(lambda: counts(sessions[1]).get("suspect") == 1, "the verdict", deadline_seconds=40)
    good, suspect = {Version(10, 1): Standing(verified=True)}, {Version(10, 1): Standing(suspect=True)}
    assert [standings(url) for url in (members[0].url, members[1].url, shared)] == [good, suspect, good]


def test_no_function_is_run_that_names_none(eager: DaemonProcess, tmp_run: str) -> None:
    member = Member(tmp_run, loader={"function": "os.system"})
    with pytest.raises(ConfigError, match="not a function"), training(eager, member):
        pass
