"""State on a CUDA device: captured without waiting for it, and restored to where the live tensors are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.client.roundtrip import assert_same, capture, restore, save

pytestmark = pytest.mark.gpu


def training(device: str, **options: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    scaler = torch.amp.GradScaler(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


def step(state: dict[str, Any], device: str) -> None:
    loss = state["model"](torch.randn(3, 4, device=device)).square().sum()
    state["scaler"].scale(loss).backward()
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_training_on_a_device_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    state, fresh = training("cuda", **options), training("cuda", **options)
    step(state, "cuda")
    stored = save(state, rng=True)
    step(state, "cuda")
    expected = save(state, rng=True)
    restore(stored, fresh, rng=True)
    assert_same(save(fresh, rng=True), stored)
    step(fresh, "cuda")
    assert_same(save(fresh, rng=True), expected)
    moments = fresh["optimizer"].state[fresh["model"][0].weight]
    assert moments["exp_avg"].is_cuda
    assert moments["step"].is_cuda == bool(options)


def test_a_capture_does_not_wait_for_the_device() -> None:
    state = training("cuda")
    step(state, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaves = capture(state, rng=True).leaves
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {leaf.tensor.device.type for leaf in leaves} == {"cuda", "cpu"}


def test_r27_a_checkpoint_of_a_device_restores_on_the_host() -> None:
    state, fresh = training("cuda"), training("cpu")
    step(state, "cuda")
    restore(save(state), fresh)
    assert fresh["optimizer"].state[fresh["model"][0].weight]["exp_avg"].device.type == "cpu"
    assert torch.equal(fresh["model"][0].weight, state["model"][0].weight.cpu())
