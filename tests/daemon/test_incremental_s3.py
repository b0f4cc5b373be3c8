"""References on a real S3 server: less is stored, readers do not care, and nothing goes that is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.retention import Outcome, apply
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import verify
from ckptd.errors import AlreadyExists, NoCheckpoint
from ckptd.format.keys import Version, checkpoint_prefix, generation_key
from ckptd.format.records import Manifest, encode
from ckptd.storage import open_backend
from ckptd.wire.messages import Committed
from devtools.processes import wait_until
from devtools.seaweedfs import S3Endpoint
from tests.daemon.member import Member
from tests.daemon.test_incremental import FROZEN, HEADER, SLOT, Parts, check_restored, content, parts_of, save, trained
from tests.daemon.trainer import DaemonProcess, Trainer, trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Root:
    """A run's root, wherever it is."""

    url: str
    options: dict[str, Any]

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[Run]:
        async with contextlib.aclosing(open_backend(self.url, self.options)) as backend:
            yield await Run.open(backend)

    def ask(self, work: Callable[[Run], Awaitable[T]]) -> T:
        async def do() -> T:
            async with self.run() as run:
                return await work(run)

        return asyncio.run(do())

    def steps(self) -> set[int]:
        """Of what is committed."""
        return {version.step for version in self.ask(lambda run: run.committed())}

    def manifest(self, version: Version) -> Manifest:
        return self.ask(lambda run: run.manifest(version))

    def stored_bytes(self, version: Version) -> int:
        """Of shards, as the store has them."""

        async def look(run: Run) -> int:
            found = [info async for info in run.backend.scan(checkpoint_prefix(version))]
            return sum(info.size_bytes for info in found if info.key.endswith(".safetensors"))

        return self.ask(look)

    def check_restores(self, version: Version, parts: Parts) -> None:
        """As :func:`check_restored`."""
        self.ask(lambda run: check_restored(run, version, parts))

    def check_all(self) -> None:
        """Whatever is committed at this moment verifies, unless it goes meanwhile."""

        async def look(run: Run) -> None:
            for version in await run.committed():
                with contextlib.suppress(NoCheckpoint):
                    found = await verify(run, version)
                    assert found.good or version not in await run.committed(), found.reason

        self.ask(look)

    def prune(self, keep: Keep) -> Outcome:
        """By hand."""
        return self.ask(lambda run: apply(run, keep, generation=1, grace_seconds=0))


@pytest.fixture
def root(s3_server: S3Endpoint) -> Root:
    return Root(s3_server.prefix(), s3_server.options)


def member_at(root: Root, **more: Any) -> Member:
    return Member(root.url, storage_options=root.options, **more)


@contextlib.contextmanager
def trains(daemon: DaemonProcess, member: Member) -> Generator[Trainer]:
    """A trainer of a generation that was opened."""

    async def opened() -> None:
        options = member.tiers[0].storage_options
        async with contextlib.aclosing(open_backend(member.url, options)) as backend:
            with contextlib.suppress(AlreadyExists):
                record = encode(replace(member, rank=0).record)
                await backend.put(generation_key(member.generation), record, if_absent=True)

    asyncio.run(opened())
    with trainer(daemon.socket, member, slot_bytes=SLOT) as session:
        yield session


def test_on_s3_only_what_has_changed_is_stored(daemon: DaemonProcess, root: Root) -> None:
    with trains(daemon, member_at(root)) as session:
        made = [save(session, step, parts_of(step)) for step in (1, 2, 3)]
        assert session.status()["counts"]["referenced_bytes"] >= 2 * len(FROZEN)
    assert root.stored_bytes(made[0]) == HEADER + len(FROZEN) + len(trained(1))
    for step, version in enumerate(made[1:], 2):
        assert root.stored_bytes(version) == HEADER + len(trained(step))
        assert root.manifest(version).references == (str(made[0]),)
    for step, version in enumerate(made, 1):
        root.check_restores(version, parts_of(step))
    wait_until(lambda: not root.ask(_reference_leases), "leases to be given back", deadline_seconds=20)


async def _reference_leases(run: Run) -> list[str]:
    return [info.key async for info in run.backend.scan("leases/") if info.key.startswith("leases/reference-")]


def test_retention_on_s3_never_breaks_a_reference(daemon: DaemonProcess, root: Root) -> None:
    with trains(daemon, member_at(root, keep_last=1)) as session:
        for step in range(1, 6):
            last = save(session, step, parts_of(step))
            root.check_all()  # while retention is at it
        wait_until(lambda: root.steps() == {1, 5}, "retention", deadline_seconds=40)
        root.check_restores(last, parts_of(5))
        last = save(session, 6, {"embedding": FROZEN[::-1], "head": trained(6)})
        wait_until(lambda: root.steps() == {6}, "what is no longer needed to go", deadline_seconds=40)
        root.check_restores(last, {"embedding": FROZEN[::-1], "head": trained(6)})


def test_what_is_about_to_be_referred_to_is_held_on_s3(daemon: DaemonProcess, root: Root) -> None:
    """Rank 0 has referred to the first checkpoint when that is to go, and rank 1 is slow."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(trains(daemon, member_at(root, rank=rank, world=2))) for rank in range(2)]

        def both(step: int, parts: Parts) -> None:
            for session in sessions:
                session.put(content(session.member, step, parts))
            assert isinstance(sessions[0].outcome(step), Committed)

        both(1, parts_of(1))
        sessions[0].durable(sessions[0].put(content(sessions[0].member, 5, parts_of(5))))
        both(2, {"embedding": FROZEN[::-1], "head": trained(2)})
        outcome = root.prune(Keep(last=1))
        assert (outcome.deleted, [*outcome.waiting]) == ([], [Version(1, 1)])
        sessions[1].put(content(sessions[1].member, 5, parts_of(5)))
        assert isinstance(sessions[0].outcome(5), Committed)
    assert root.prune(Keep(last=1)).deleted == [Version(2, 1)]
    root.check_restores(Version(5, 1), parts_of(5))


@pytest.mark.parametrize("every", [1, 2])
def test_from_a_local_tier_onward_to_s3(daemon: DaemonProcess, root: Root, tmp_path: Path, every: int) -> None:
    """Each tier refers to what it holds itself, however little the nearest one keeps."""
    near = Root(f"file://{tmp_path / 'near'}", {})
    member = Member(
        near.url,
        far_url=root.url,
        far_every_steps=every,
        keep_last=1,
        far_keep_last=2,
        storage_options=root.options,
    )
    copied: list[Version] = []
    with trains(daemon, member) as session:
        for step in range(1, 7):
            version = save(session, step, parts_of(step))
            if step == 1 or step % every == 0:
                wait_until(lambda step=step: step in root.steps(), f"step {step} on S3", deadline_seconds=40)  # type: ignore[misc]
                copied.append(version)
                root.check_all()
        assert root.stored_bytes(copied[0]) == HEADER + len(FROZEN) + len(trained(1))
        for version in copied[-2:]:
            assert root.stored_bytes(version) == HEADER + len(trained(version.step))
            assert root.manifest(version).references == (str(copied[0]),)
            root.check_restores(version, parts_of(version.step))
        kept = {copied[0].step, *(version.step for version in copied[-2:])}
        wait_until(lambda: root.steps() == kept, "retention on S3", deadline_seconds=40)
        wait_until(lambda: near.steps() == {1, 6}, "retention near", deadline_seconds=40)
        near.check_restores(Version(6, 1), parts_of(6))
    root.check_all()
