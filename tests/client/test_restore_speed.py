"""What makes a restore fast, and must not make it wrong."""

from __future__ import annotations

import gc
import threading
from typing import NoReturn

import pytest
import torch

from ckptd.format.digests import digest_blocks, first_difference
from ckptd_client.blocking import run_blocking
from ckptd_client.capture import copying
from ckptd_client.capture.copying import copy_all
from ckptd_client.collecting import collecting_later
from ckptd_client.threads import shared_out


def live_tensors() -> list[torch.Tensor]:
    return [
        torch.zeros(()),
        torch.zeros(0, 5),
        torch.zeros(1000, 7, dtype=torch.bfloat16),
        torch.zeros(7, 1000).t(),
        torch.zeros(40, 300, dtype=torch.complex64),
        torch.zeros(300, 301)[:, ::2],
        torch.zeros(3000, dtype=torch.float64),
        torch.zeros(64, 64, dtype=torch.int8),
    ]


@pytest.mark.parametrize("batch_bytes", [16, 4096, 1 << 23])
def test_all_tensors_are_copied_wherever_batches_are_cut(monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(copying, "BATCH_BYTES", batch_bytes)
    targets = live_tensors()
    around = [target.untyped_storage().nbytes() for target in targets]
    sources = [torch.randn(target.shape).to(target.dtype).contiguous() for target in targets]
    copy_all(list(zip(targets, sources, strict=True)))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert [target.untyped_storage().nbytes() for target in targets] == around
    assert not torch.as_strided(targets[5], (300, 150), (301, 2), 1).any()  # what lies between the columns


def test_a_cast_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BATCH_BYTES", 64)
    target, source = torch.zeros(1000, dtype=torch.float16), torch.randn(1000, dtype=torch.float64)
    copy_all([(target, source)])
    assert torch.equal(target, source.half())


def test_work_that_is_shared_out_comes_back_in_order_and_fails_as_one() -> None:
    assert shared_out(lambda number: number * 2, list(range(100))) == list(range(0, 200, 2))
    assert shared_out(str, list[int]()) == []

    def third(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        shared_out(third, list(range(10)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptd-restore")]


def test_garbage_waits_and_no_longer() -> None:
    assert gc.isenabled()
    found: list[bool] = []

    def fail() -> NoReturn:
        found.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError), collecting_later():
        fail()
    assert (found, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled()  # whoever has turned it off may have a reason
    finally:
        gc.enable()


class Unspeakable:
    def __repr__(self) -> NoReturn:
        raise AssertionError("spelled out")


def test_what_a_coroutine_returns_is_not_spelled_out() -> None:
    async def read() -> list[Unspeakable]:
        return [Unspeakable()]

    assert len(run_blocking(read())) == 1


def test_the_first_digest_that_differs_is_found() -> None:
    data = memoryview(bytes(range(256)) * 4)
    bounds = [(start, start + 100) for start in range(0, 1000, 100)]
    promised = digest_blocks(data, bounds)
    assert first_difference(promised, promised) is None
    for number, (start, _) in enumerate(bounds):
        changed = bytearray(data)
        changed[start + 99] ^= 1
        assert first_difference(digest_blocks(memoryview(changed), bounds), promised) == number
    assert first_difference(promised[:-16], promised) == 9
