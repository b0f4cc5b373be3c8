"""A real model of which a part is frozen: only the rest is stored, and it restores bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ckptd_client import Checkpointer

Open = Callable[..., Checkpointer]


class Adapted(torch.nn.Module):
    """A frozen embedding with a trained adapter and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2_000, 64)
        self.embedding.requires_grad_(False)
        self.adapter = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.adapter(self.embedding(tokens)).mean(1))


def train(model: Adapted, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randint(0, 2_000, (8, 16))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stored_bytes(url: str) -> list[int]:
    """Of each checkpoint's shards, oldest first."""
    folders = sorted(Path(url.removeprefix("file://")).glob("checkpoints/*"))
    return [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in folders]


def test_frozen_layers_are_stored_once_and_restore_bit_for_bit(open_ckpt: Open, tmp_run: str) -> None:
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with open_ckpt(tmp_run, {"model": model, "optimizer": optimizer}, launch="one") as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            ckpt.save(step).wait(timeout=60)
    first, *later = stored_bytes(tmp_run)
    assert all(size < first / 4 for size in later)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    other = Adapted()
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    with open_ckpt(tmp_run, {"model": other, "optimizer": fresh}, launch="two") as ckpt:
        assert ckpt.restore(required=True).step == 3
        for name, value in other.state_dict().items():
            assert torch.equal(value, expected[name]), name
        train(other, fresh)
        ckpt.save(4).wait(timeout=60)
    assert stored_bytes(tmp_run)[3] < first / 4  # what the new launch restored is stored already


def test_it_can_be_turned_off(open_ckpt: Open, tmp_run: str) -> None:
    model = Adapted()
    with open_ckpt(tmp_run, {"model": model}, incremental=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait(timeout=60)
    first, second = stored_bytes(tmp_run)
    assert second > 0.99 * first
