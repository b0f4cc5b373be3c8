"""Snapshots from a CUDA device: bit-exact whatever the compute stream is doing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckptd_client import Checkpointer
from ckptd_client.reader import open_checkpoint
from tests.client.conftest import Training

pytestmark = pytest.mark.gpu
Open = Callable[..., Checkpointer]


def on_device(width: int = 1024) -> Training:
    training = Training(width=width)
    training.model.to("cuda")
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.01, fused=True)
    training.scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 5)
    return training


def step(training: Training) -> None:
    loss = training.model(torch.randn(64, training.width, device="cuda")).square().mean()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    training.scheduler.step()


def test_snapshots_are_exact_while_the_compute_stream_is_busy(open_ckpt: Open, tmp_run: str) -> None:
    training = on_device()
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1, slots=3)
    busy = torch.randn(4096, 4096, device="cuda")
    expected: dict[int, torch.Tensor] = {}
    overlapped = 0
    for number in range(1, 9):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)  # queued in front of everything that follows
        step(training)
        expected[number] = training.model[1].weight.detach().clone()
        save = ckpt.step(number)
        assert save is not None
        overlapped += save.stats.overlapped_bytes
    ckpt.close()
    assert overlapped
    for number in (7, 8):
        with open_checkpoint(tmp_run, number) as view:
            assert torch.equal(view["model/1.weight"].tensor(), expected[number].cpu())


def test_restored_bits_are_those_of_the_uninterrupted_run(open_ckpt: Open, tmp_run: str) -> None:
    torch.use_deterministic_algorithms(True)
    reference = on_device()
    for _ in range(6):
        step(reference)
    training = on_device()
    with open_ckpt(tmp_run, training.state, every_steps=1) as ckpt:
        for number in range(1, 4):
            step(training)
            ckpt.step(number)
    again = on_device()
    with open_ckpt(tmp_run, again.state) as ckpt:
        assert ckpt.restore().step == 3
        for _ in range(3):
            step(again)
    torch.use_deterministic_algorithms(False)
    pairs = zip(again.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
