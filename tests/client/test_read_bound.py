"""What a restore reads beside what it wants, as the backend counts it: bounded, and told as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ckptd.limits import BLOCK_BYTES_WRITTEN as BLOCK
from ckptd.limits import MIB
from ckptd.storage import Backend
from ckptd_backends.wrappers import Traced
from ckptd_client import Checkpointer, FlatPartition, FlatSlice
from tests.client.conftest import Daemon

WHOLE = 24 * MIB
OFFSETS = {"first": 0, "second": 1, "middle": BLOCK // 2, "last": BLOCK - 1}
"""Where in its first block a run begins."""


class Stored(NamedTuple):
    """One tensor of bytes in a checkpoint, and a node that has nothing of it in memory."""

    url: str
    values: torch.Tensor
    socket: Path


@pytest.fixture(scope="module")
def stored(private_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    url = f"file://{tmp_path_factory.mktemp('bound')}"
    values = torch.randint(0, 256, (WHOLE,), dtype=torch.uint8)
    writes, reads = Daemon(private_folders / "writes"), Daemon(private_folders / "reads")
    writes.start()
    with Checkpointer(url, {"x": {"bytes": values}}, socket=writes.socket, rng=False) as ckpt:
        ckpt.save(1).wait(timeout=60)
    writes.kill()
    reads.start()
    yield Stored(url, values, reads.socket)
    reads.kill()


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int]]]:
    """Calls and bytes of all reads into memory that backends were asked for meanwhile."""
    made: list[Traced] = []
    begin = Traced.__init__

    def noted(traced: Traced, inner: Backend) -> None:
        begin(traced, inner)
        made.append(traced)

    def so_far() -> tuple[int, int]:
        counts = [traced.counts["read_into"] for traced in made]
        return sum(count.calls for count in counts), sum(count.size_bytes for count in counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traced, "__init__", noted)
        yield so_far


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("length", [2, BLOCK, 8 * BLOCK, MIB + 2, 5 * MIB, 5 * MIB + 2, 8 * MIB, 8 * MIB + 2])
def test_a_run_reads_its_own_blocks_and_says_so(stored: Stored, length: int, offset: str) -> None:
    start = 3 * BLOCK + OFFSETS[offset]
    part = FlatPartition(
        torch.zeros(length, dtype=torch.uint8), [FlatSlice("bytes", (WHOLE,), start, start + length, 0)]
    )
    with Checkpointer(stored.url, {"x": part}, socket=stored.socket, rng=False) as ckpt, counted() as read:
        restored = ckpt.restore()
        calls, read_bytes = read()
    assert restored.source == "storage"
    assert torch.equal(part.buffer, stored.values[start : start + length])
    amount = restored.amount
    assert (amount.bytes_wanted, amount.bytes_read, amount.requests) == (length, read_bytes, calls)
    blocks = (start + length - 1) // BLOCK - start // BLOCK + 1
    assert read_bytes == blocks * BLOCK
    if length >= 8 * MIB:
        assert read_bytes <= 1.04 * length
    elif length >= 5 * MIB:
        assert read_bytes <= 1.05 * length


def test_the_bounds_are_those_of_the_worst_case() -> None:
    """One byte in the first block and one in the last, at the least length for which each bound is promised."""
    for length, bound in ((5 * MIB, 1.05), (8 * MIB, 1.04)):
        assert all((size + 2 * (BLOCK - 1)) // BLOCK * BLOCK <= bound * size for size in range(length, length + BLOCK))
