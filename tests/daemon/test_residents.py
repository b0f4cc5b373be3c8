"""Resident pieces: held in the slot, never written, and compared with what their owners wrote where that is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from ckptd.arena.memory import pages
from ckptd.format.digests import digest
from ckptd.format.records import Receipt, Snapshot, Span, decode, encode
from ckptd.limits import BLOCK_BYTES_WRITTEN
from ckptd.wire.messages import Committed, Failed
from tests.daemon.stored import manifest, receipt, run_folder
from tests.daemon.trainer import RUN, Content, DaemonProcess, Member, Trainer, trainer
from tests.format.saved import Held, Rank

SIZE = BLOCK_BYTES_WRITTEN + 5
HALVES = [bytes(i % 251 for i in range(SIZE)), bytes(i % 241 for i in range(SIZE))]


def content(member: Member, copy: bytes, *, check_replicas: bool) -> Content:
    """Half a tensor each, and the other's half as a resident piece."""
    spans = [Span(0, SIZE), Span(SIZE, 2 * SIZE)]
    mine, other = member.rank, 1 - member.rank
    held = Held("w", "uint8", (2 * SIZE,), [(spans[mine], HALVES[mine])], resident=[(spans[other], copy)])
    rank = Rank([held], rank=mine, world=2, step=7, run=RUN, check_replicas=check_replicas)
    layout, slot = rank.held()
    shard = slot[: layout.shard_bytes]
    return Content(shard, encode(rank.snapshot(layout)), rank.version, slot[pages(len(shard)) :])


def save(session: Trainer, found: Content) -> None:
    at = session.begin(found)
    session.copy(at, found, 0, len(found.shard))
    session.seal(at)


def save_both(daemon: DaemonProcess, url: str, copies: Sequence[bytes], *, check_replicas: bool) -> Committed | Failed:
    members = [Member(url, rank=rank, world=2) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(trainer(daemon.socket, member)) for member in members]
        for session, copy in zip(sessions, copies, strict=True):
            save(session, content(session.member, copy, check_replicas=check_replicas))
        return sessions[0].outcome(7)


@pytest.mark.parametrize("check_replicas", [False, True])
def test_resident_pieces_are_held_and_not_written(daemon: DaemonProcess, tmp_run: str, check_replicas: bool) -> None:
    assert isinstance(save_both(daemon, tmp_run, HALVES[::-1], check_replicas=check_replicas), Committed)
    for rank in range(2):
        found = receipt(tmp_run, content(Member(tmp_run), HALVES[1], check_replicas=False).version, rank, 2)
        assert found is not None
        proof = decode(found, Receipt)
        stored = (run_folder(tmp_run) / proof.shard.key).read_bytes()
        assert stored.endswith(HALVES[rank])
        assert len(stored) == proof.shard.bytes == 4096 + SIZE
        other = HALVES[1 - rank]
        expected = digest(other[:BLOCK_BYTES_WRITTEN]) + digest(other[BLOCK_BYTES_WRITTEN:])
        assert proof.shard.resident_blocks == (expected if check_replicas else b"")
        assert decode(proof.snapshot, Snapshot).check_replicas is check_replicas


def test_a_replica_that_differs_refuses_the_commit(daemon: DaemonProcess, tmp_run: str) -> None:
    wrong = HALVES[1][:-1] + b"?"
    failed = save_both(daemon, tmp_run, [wrong, HALVES[0]], check_replicas=True)
    assert isinstance(failed, Failed)
    assert "w: ranks 0 and 1 hold different values of the same part" in failed.message
    assert manifest(tmp_run, content(Member(tmp_run), wrong, check_replicas=True).version) is None
