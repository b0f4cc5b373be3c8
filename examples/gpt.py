"""A small GPT, and a data set that every machine has: the sources of Python's own library, byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
TEXT_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is. ``context``: bytes that it sees at once."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 64
    dropout: float = 0.1


class Block(nn.Module):
    """Attention to what came before, then a layer that works on each place alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.norm_attention = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, place, width; so is the result."""
        batch, length, width = x.shape
        qkv = self.query_key_value(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + functional.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)
        y: Tensor = self.feed_forward(x)
        return x + y


class GPT(nn.Module):
    """Predicts the next byte; the output layer is tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """The mean loss of predicting ``following`` from ``text``."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        logits = self.head(self.norm(self.blocks(x)))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        return loss


def library_text() -> Tensor:
    """The first :data:`TEXT_BYTES_MAX` bytes of the standard library's top-level modules, in the order of their
    names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES_MAX:
            break
    return torch.frombuffer(text[:TEXT_BYTES_MAX], dtype=torch.uint8).long()


class Batches:
    """Endless batches of windows of a text, each epoch in an order of its own. A loader with ``state_dict``: what a
    checkpoint needs to go on at the very next window.

    Ranks of a world share an epoch's order, and each takes every ``world``-th window.
    """

    def __init__(self, text: Tensor, *, size: int, context: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self._windows = text[: (len(text) - 1) // context * context].view(-1, context)
        self._following = text[1 : self._windows.numel() + 1].view(-1, context)
        self._size = size
        self._rank = rank
        self._world = world
        self._position = {"seed": seed, "epoch": 0, "taken": 0}
        self._order = self._shuffled()

    def _shuffled(self) -> Tensor:
        shuffle = torch.Generator().manual_seed(self._position["seed"] + self._position["epoch"])
        return torch.randperm(len(self._windows), generator=shuffle)[self._rank :: self._world]

    def take(self) -> tuple[Tensor, Tensor]:
        """The next batch, and the bytes that follow; what is left of an epoch that makes no whole batch is skipped."""
        if self._position["taken"] + self._size > len(self._windows) // self._world:
            self._position["epoch"] += 1
            self._position["taken"] = 0
            self._order = self._shuffled()
        start = self._position["taken"]
        self._position["taken"] = start + self._size
        chosen = self._order[start : start + self._size]
        return self._windows[chosen], self._following[chosen]

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and position are one unit."""
        return dict(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved one was."""
        self._position = dict(state)
        self._order = self._shuffled()
