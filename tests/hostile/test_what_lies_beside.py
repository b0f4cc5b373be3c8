"""Leases, tombstones, marks and what else lies beside checkpoints is damaged in any way: nothing good is lost by it,
what retention cannot tell stays, and the object is named."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptd.checkpoint import leases
from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.leases import reader_stem, reference_stem, writer_stem
from ckptd.checkpoint.retention import Outcome
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import newest_good, verify
from ckptd.errors import CkptdError, FormatError
from ckptd.format.keys import Version, tombstone_key
from ckptd.format.records import Tombstone, encode
from ckptd.limits import LEASE_SECONDS
from ckptd.storage import open_backend
from ckptd_client.agreement import Agreement
from tests.checkpoint.builder import make_run, retire
from tests.client.test_agreement import outcomes, start
from tests.hostile.damages import changed, flip, put_bomb, swap, truncate

Damage = Callable[[Path, Path], None]
"""Of an object; the other one is of the same kind."""


def _flip_structure(data: bytearray) -> None:
    data[0] ^= 2


DAMAGES: dict[str, Damage] = {
    "removed": lambda path, _: path.unlink(),
    "flipped": changed(flip),
    "flipped at its start": changed(_flip_structure),
    "truncated": changed(truncate),
    "extended": changed(lambda data: data.extend(b"}" * 100)),
    "emptied": lambda path, _: path.write_bytes(b""),
    "swapped": swap,
    "a pickle": lambda path, _: put_bomb(path, path.parent),
}

READ, REFERRED, DELETED, PINNED, VERIFIED, SUSPECT, NEWEST = (Version(step, 1) for step in range(10, 80, 10))
"""Checkpoints, and what is special about each."""


@dataclass
class Beside:
    """A run with something of each kind beside it."""

    run: Run
    root: Path

    async def prune(self) -> Outcome:
        return await retire(self.run, Keep(last=1), generation=1)


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[Beside]:
    root = tmp_path / "run"
    async with contextlib.aclosing(open_backend(f"file://{root}")) as backend:
        run = await Run.open(backend, create=True)
        steps = [version.step for version in (READ, REFERRED, DELETED, PINNED, VERIFIED, SUSPECT, NEWEST)]
        await make_run(run, steps)
        for version, stem, purpose in (
            (READ, reader_stem(READ), "reader"),
            (REFERRED, reference_stem(REFERRED), "reference"),
            (NEWEST, reader_stem(NEWEST), "reader"),
            (NEWEST, reference_stem(NEWEST), "reference"),
        ):
            await leases.take(backend, stem, purpose=purpose, holder="test", version=version)  # type: ignore[arg-type]
        for launch in ("ours", "theirs"):
            await leases.take(backend, writer_stem(launch), purpose="writer", holder="test")
        for version in (DELETED, READ):
            await backend.put(tombstone_key(version), encode(Tombstone(reason="test", version=str(version))))
        for version in (PINNED, NEWEST):
            await run.add_mark(version, "pinned", by="test", reason="")
        for version in (VERIFIED, PINNED):
            await run.add_mark(version, "verified", by="test", reason="")
        for version in (SUSPECT, DELETED):
            await run.add_mark(version, "suspect", by="test", reason="")
        yield Beside(run, root)
        assert not list(root.rglob("exploded")), "something of it was executed"


def _key(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


LEASES = {
    "reader's lease": (READ, f"leases/reader-{READ}-*.json"),
    "reference's lease": (REFERRED, f"leases/reference-{REFERRED}-*.json"),
}
MARKS = {
    "tombstone": (f"tombstones/{DELETED}.json", f"tombstones/{READ}.json"),
    "pin": (f"marks/{PINNED}/pinned-*.json", f"marks/{NEWEST}/pinned-*.json"),
    "verdict": (f"marks/{VERIFIED}/verified-*.json", f"marks/{PINNED}/verified-*.json"),
    "suspicion": (f"marks/{SUSPECT}/suspect-*.json", f"marks/{DELETED}/suspect-*.json"),
}
"""And another object of the kind."""


async def _check_good(beside: Beside, kept: set[Version]) -> None:
    """What is kept verifies, and so does everything that is still committed."""
    committed = await beside.run.committed()
    assert kept <= set(committed)
    for version in committed:
        found = await verify(beside.run, version)
        assert found.good, found.reason
    assert (await newest_good(beside.run)).version == NEWEST


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", LEASES)
async def test_a_damaged_lease_holds_until_it_expires(beside: Beside, kind: str, damage: str) -> None:
    """Whose it is nobody can tell, so whatever may be held stays."""
    version, pattern = LEASES[kind]
    (path,) = beside.root.glob(pattern)
    (other,) = beside.root.glob(pattern.replace(str(version), str(NEWEST)))
    DAMAGES[damage](path, other)
    outcome = await beside.prune()
    readable = damage in ("removed",)
    protected = {PINNED, VERIFIED, NEWEST}
    await _check_good(beside, protected if readable else {version, *protected})
    if not readable:
        said = {**outcome.failed, **outcome.waiting}[version]
        assert _key(beside.root, path) in said
        for lease in (path, other):
            os.utime(lease, (0, time.time() - 2 * LEASE_SECONDS))
        await beside.prune()
        assert version not in await beside.run.committed()
        assert not path.exists()
        await _check_good(beside, protected)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_lease_of_a_writer_keeps_others_out_and_is_named(beside: Beside, damage: str) -> None:
    for path in beside.root.glob("leases/*"):
        if not path.name.startswith(writer_stem("theirs")):
            path.unlink()
    (path,) = beside.root.glob(f"leases/{writer_stem('theirs')}*")
    other = path.with_name(f"{writer_stem('gone')}x-000000.json")
    other.write_bytes(path.read_bytes())
    DAMAGES[damage](path, other)

    async def claim() -> None:
        await (await beside.run.claim_writer(launch="mine", holder="test")).release()

    if damage == "removed":
        other.unlink()
        await claim()
        return
    with pytest.raises(CkptdError) as refused:
        await claim()
    # Of two leases of writers that are swapped each says much the same.
    assert damage == "swapped" or _key(beside.root, path) in str(refused.value)
    for lease in (path, other):
        os.utime(lease, (0, time.time() - 2 * LEASE_SECONDS))
    await claim()
    assert not path.exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", MARKS)
async def test_a_damaged_mark_or_tombstone_loses_nothing(beside: Beside, kind: str, damage: str) -> None:
    """What they say is in their names. One that is removed says nothing, and what nothing else keeps may go."""
    (path,), (other,) = (beside.root.glob(pattern) for pattern in MARKS[kind])
    DAMAGES[damage](path, other)
    protected = {PINNED, VERIFIED, NEWEST, READ, REFERRED}
    if damage == "removed":
        # Without its mark the newest that was verified is another one.
        protected -= {"pin": {PINNED}, "verdict": {VERIFIED}}.get(kind, set[Version]())
    outcome = await beside.prune()
    await _check_good(beside, protected)
    assert DELETED not in await beside.run.committed()
    assert not outcome.failed
    version = {"pin": PINNED, "verdict": VERIFIED}.get(kind)
    if version is not None and version in await beside.run.committed() and damage not in ("removed", "swapped"):
        with contextlib.suppress(FormatError):  # a flipped reason says something else, and is sound
            await beside.run.marks(version)
            assert damage == "flipped"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("who", [0, 1])
def test_a_damaged_word_of_a_rank_at_the_start_is_heard_by_all(tmp_path: Path, damage: str, who: int) -> None:
    world = start(tmp_path, 2, deadline_seconds=1 if damage == "removed" else 20)
    put = world[who].store.put

    def damaged(key: str, value: bytes) -> None:
        path, other = tmp_path / "word", tmp_path / "another"
        path.write_bytes(value)
        other.write_bytes(b'{"rank":7,"topic":"other","value":1,"result":1}')
        DAMAGES[damage](path, other)
        if path.exists():
            put(key, path.read_bytes())

    world[who].store.put = damaged  # type: ignore[method-assign]

    def ask(rank: Agreement) -> object:
        return rank.decide("step", rank.rank, lambda values: max(values))

    found = outcomes(world, ask)
    hears = found if who == 1 else found[1:]
    assert all(isinstance(error, CkptdError) for error in hears), found
    if damage != "removed":
        assert all(f"0001{'-00001' if who else ''}.json" in str(error) for error in hears), found
    assert not list(tmp_path.rglob("exploded"))
