"""What exists, on which line, and who may write."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest

from ckptd.checkpoint import leases, processes
from ckptd.checkpoint.run import Run
from ckptd.errors import (
    AccessDenied,
    FormatError,
    IntegrityError,
    NoCheckpoint,
    NotFound,
    RunInUse,
    Unavailable,
    UsageError,
)
from ckptd.format.keys import LEASES, Version, generation_key, manifest_key
from ckptd.format.records import Lease, encode
from ckptd.limits import LEASE_SECONDS
from ckptd.storage import Backend, ObjectInfo, open_backend
from ckptd_backends.wrappers.base import Wrapper
from ckptd_backends.wrappers.faults import Faulty
from devtools.processes import wait_until
from tests.checkpoint.builder import (
    LAUNCH,
    commit,
    flip,
    keys_of,
    make_checkpoint,
    make_run,
    open_generation,
    small_state,
    tamper,
    write_rank,
)


class Denied(Wrapper):
    """A store whose listings and reads are refused, or time out."""

    def __init__(self, inner: Backend, error: type[Exception]) -> None:
        super().__init__(inner)
        self.error = error

    async def get(self, key: str, *, limit_bytes: int) -> bytes:
        raise self.error("no")

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        raise self.error("no")
        yield


class Aged(Wrapper):
    """A store in which what is there now was put long ago."""

    def __init__(self, inner: Backend, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.old: set[str] = set()

    async def settle(self) -> None:
        self.old = set(await keys_of(self.inner))

    async def scan(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.scan(prefix):
            age = self.seconds if info.key in self.old else 0.0
            yield ObjectInfo(info.key, info.size_bytes, info.modified_seconds - age)

    async def delete(self, keys: Iterable[str]) -> None:
        await self.inner.delete(keys)


async def test_racing_creators_get_one_run(backend: Backend) -> None:
    runs = await asyncio.gather(*[Run.open(backend, create=True) for _ in range(8)])
    assert len({run.id for run in runs}) == 1
    assert (await Run.open(backend)).id == runs[0].id


async def test_no_run_is_told_from_cannot_tell(backend: Backend) -> None:
    with pytest.raises(NoCheckpoint, match="holds no run"):
        await Run.open(backend)
    for error in (AccessDenied, Unavailable):
        with pytest.raises(error):
            await Run.open(Denied(backend, error), create=True)
    assert await keys_of(backend) == []


async def test_runs_below_are_named() -> None:
    for name in ("gpt", "bert"):
        await Run.open(open_backend(f"memory://below/{name}"), create=True)
    parent = open_backend("memory://below")
    for name in ("gpt", "bert"):
        await parent.put(f"{name}/run.json", b"{}")
    with pytest.raises(NoCheckpoint) as error:
        await Run.open(parent)
    assert error.value.hint == "runs lie below it: bert, gpt"


async def test_a_lost_run_record_is_damage_not_absence(run: Run) -> None:
    await make_run(run, [10])
    await run.backend.delete(["run.json"])
    for create in (False, True):
        with pytest.raises(IntegrityError, match=r"run\.json is missing"):
            await Run.open(run.backend, create=create)


async def test_generations_are_numbered_once(run: Run) -> None:
    numbers = await asyncio.gather(*[open_generation(run) for _ in range(6)])
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]
    records = await run.generations()
    assert [(record.generation, record.launch, record.run) for record in records] == [
        (number, LAUNCH, run.id) for number in range(1, 7)
    ]


async def test_a_generation_whose_answer_was_lost_is_ours(run: Run, backend: Backend) -> None:
    from ckptd_backends.wrappers.retrying import Retrying

    lossy = Run(Retrying(Faulty(backend, fail_at=1, when="after")), run.id)
    assert await open_generation(lossy) == 1
    assert await run.generation_numbers() == [1]


async def test_line_goes_through_parents(run: Run) -> None:
    first = await make_run(run, [10, 20, 30])
    second = await make_run(run, [25, 35], opened_from=first[1])
    await open_generation(run, opened_from=first[0])  # never commits, and so orphans nothing
    assert await run.line() == [second[1], second[0], first[1], first[0]]
    assert await run.latest() == second[1]
    assert await run.committed() == [*first, *second]
    held = Version(40, 2)
    assert (await run.line(also=[held]))[0] == held


async def test_line_goes_through_generations_that_retention_emptied(run: Run) -> None:
    first = await make_run(run, [10])
    second = await make_run(run, [20], opened_from=first[0])
    third = await make_run(run, [30], opened_from=second[0])
    await run.backend.delete([manifest_key(second[0])])
    assert await run.line() == [third[0], first[0]]


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
async def test_line_survives_a_damaged_generation(run: Run, damage: str) -> None:
    first = await make_run(run, [10, 20])
    second = await make_run(run, [15], opened_from=first[0])
    key = generation_key(2)
    if damage == "missing":
        await run.backend.delete([key])
    else:
        await tamper(run.backend, key, lambda data: data.clear())
    assert await run.line() == [second[0], first[0]]


async def test_selectors(run: Run) -> None:
    first = await make_run(run, [10, 20])
    second = await make_run(run, [20, 30], opened_from=first[0])
    assert await run.resolve("latest") == second[1]
    assert await run.resolve(20) == await run.resolve("20") == second[0]
    assert await run.resolve("20-g1") == await run.resolve("000000000020-g000001") == first[1]
    with pytest.raises(NoCheckpoint) as error:
        await run.resolve(99)
    assert "30-g2, 20-g2, 10-g1" in error.value.hint
    for wrong in ("newest", "", "-3", "20-g", "1.5"):
        with pytest.raises(UsageError):
            await run.resolve(wrong)


async def test_a_step_beside_the_line_is_found_if_it_is_the_only_one(run: Run) -> None:
    await make_run(run, [7, 9])
    await make_run(run, [9])
    await make_run(run, [1])
    assert await run.resolve(7) == Version(7, 1)
    with pytest.raises(NoCheckpoint, match="more than once") as error:
        await run.resolve(9)
    assert error.value.hint == "name one of 9-g2, 9-g1"


async def test_nothing_committed_names_what_is_incomplete(run: Run) -> None:
    with pytest.raises(NoCheckpoint, match="no checkpoint"):
        await run.resolve("latest")
    version = Version(5, await open_generation(run))
    await write_rank(run, version, small_state())
    with pytest.raises(NoCheckpoint) as error:
        await run.resolve("latest")
    assert error.value.hint == "incomplete, and so never used: 5-g1"
    assert await run.incomplete() == [version]
    assert await run.latest() is None


async def test_foreign_names_are_not_ours(run: Run) -> None:
    await make_run(run, [10])
    for key in ("manifests/notes.txt", "generations/old.json", "checkpoints/step_000900/a.bin", "marks/x/y.json"):
        await run.backend.put(key, b"what?")
    assert await run.committed() == [Version(10, 1)]
    assert await run.generation_numbers() == [1]
    assert await run.incomplete() == []
    assert await run.marked() == {}


async def test_manifest_of_another_checkpoint_is_refused(run: Run) -> None:
    (version,) = await make_run(run, [10])
    data = await run.backend.get(manifest_key(version), limit_bytes=1 << 20)
    await run.backend.put(manifest_key(Version(20, 1)), data)
    with pytest.raises(IntegrityError, match="is the manifest of 10-g1"):
        await run.manifest(Version(20, 1))
    with pytest.raises(NoCheckpoint, match="30-g1 is not committed"):
        await run.manifest(Version(30, 1))


async def test_errors_name_the_object(run: Run) -> None:
    (version,) = await make_run(run, [10])
    await tamper(run.backend, manifest_key(version), flip(0))
    with pytest.raises(FormatError) as error:
        await run.manifest(version)
    assert error.value.message.startswith(f"{run.backend.url}/{manifest_key(version)}: ")
    assert "ckptd verify" in error.value.hint
    await tamper(run.backend, generation_key(1), lambda data: data.extend(bytes(2 << 20)))
    with pytest.raises(FormatError, match="at most"):
        await run.generation(1)
    with pytest.raises(NotFound):
        await run.generation(2)


async def test_marks(run: Run) -> None:
    (version,) = await make_run(run, [10])
    await run.add_mark(version, "pinned", by="me", reason="good one")
    await run.add_mark(version, "unpinned", by="me", reason="not any more")
    assert [mark.mark for mark in await run.marks(version)] == ["pinned", "unpinned"]
    assert await run.marked() == {version: ["pinned", "unpinned"]}


# Writers


async def test_one_writer_at_a_time(run: Run) -> None:
    lease = await run.claim_writer(launch="job#0", holder="node7, process 3, launch job")
    for _ in range(3):
        await lease.renew()
    restarted = await run.claim_writer(launch="job#1", holder="node8")  # the same job
    with pytest.raises(RunInUse, match=r"node7|node8") as error:
        await run.claim_writer(launch="other", holder="node9")
    assert "takeover" in error.value.hint
    await lease.release()
    await restarted.release()
    other = await run.claim_writer(launch="other", holder="node9")
    assert await keys_of(run.backend, LEASES) == [other.key]


async def test_takeover_removes_the_other_claim(run: Run) -> None:
    old = await run.claim_writer(launch="a", holder="A")
    new = await run.claim_writer(launch="b", holder="B", takeover=True)
    assert await keys_of(run.backend, LEASES) == [new.key]
    await old.renew()  # the old one has not noticed yet
    with pytest.raises(RunInUse):
        await run.claim_writer(launch="c", holder="C")


async def test_two_that_claim_at_once_never_both_win(run: Run) -> None:
    claims = await asyncio.gather(
        *[run.claim_writer(launch=name, holder=name) for name in "abcd"], return_exceptions=True
    )
    assert sum(not isinstance(claim, BaseException) for claim in claims) <= 1
    assert all(isinstance(claim, RunInUse) for claim in claims if isinstance(claim, BaseException))


async def test_a_claim_expires_by_the_stores_clock(run: Run, backend: Backend) -> None:
    aged = Aged(backend, LEASE_SECONDS + 1)
    await run.claim_writer(launch="a", holder="A")
    with pytest.raises(RunInUse):
        await Run(aged, run.id).claim_writer(launch="b", holder="B")
    await aged.settle()
    claimed = await Run(aged, run.id).claim_writer(launch="b", holder="B")
    assert await keys_of(backend, LEASES) == [claimed.key]  # the expired one was swept


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own to kill."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


async def test_a_claim_of_a_dead_process_holds_nobody_up(run: Run, sleeper: subprocess.Popen[bytes]) -> None:
    here = processes.own_identity().rsplit(":", 2)[0]
    identity = f"{here}:{sleeper.pid}:{processes.started(sleeper.pid)}"
    record = Lease(holder="sleeper", process=identity, purpose="writer", version=None)
    await run.backend.put(f"{LEASES}{leases.writer_stem('a')}x-000000.json", encode(record))
    assert not processes.is_gone(identity)
    with pytest.raises(RunInUse, match="sleeper"):
        await run.claim_writer(launch="b", holder="B")
    sleeper.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # and nobody takes notice
    assert processes.is_gone(identity)
    await run.claim_writer(launch="b", holder="B")
    sleeper.wait()
    assert processes.is_gone(identity)


def test_a_process_whose_first_thread_has_ended_is_not_gone() -> None:
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            stat = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: " Z " in stat.read_text(), "its first thread to end", deadline_seconds=60)
            here = processes.own_identity().rsplit(":", 2)[0]
            assert not processes.is_gone(f"{here}:{process.pid}:{processes.started(process.pid)}")
        finally:
            process.kill()


@pytest.mark.parametrize("identity", ["", "another-boot.1:1:1", "nonsense"])
def test_a_process_that_cannot_be_seen_is_not_gone(identity: str) -> None:
    assert not processes.is_gone(identity)


async def test_a_claim_that_fails_leaves_no_lease(run: Run, backend: Backend) -> None:
    await run.claim_writer(launch="a", holder="A")
    before = await keys_of(backend, LEASES)
    with pytest.raises(RunInUse):
        await run.claim_writer(launch="b", holder="B")
    assert await keys_of(backend, LEASES) == before


async def test_the_same_receipts_commit_once(run: Run) -> None:
    version = Version(10, await open_generation(run))
    receipt = await write_rank(run, version, small_state())
    await commit(run, [receipt])
    with pytest.raises(Exception, match="an object is there"):
        await commit(run, [receipt])
    assert await run.line() == [version]
    with pytest.raises(Exception, match="an object is there"):
        await make_checkpoint(run, version)
