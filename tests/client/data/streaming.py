"""Runs of a stream: all ranks one after the other in this process, over any number of starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckptd_client.data import ResumableStream, Source


class Documents:
    """A sized source: documents of tokens, whose lengths are known without reading them."""

    def __init__(self, shards: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._shards = dict(shards)
        self.shards: Sequence[str] = tuple(shards)
        self.opened: list[tuple[str, int]] = []

    def count(self, shard: str) -> int:
        return len(self._shards[shard])

    def sizes(self, shard: str) -> Sequence[int]:
        return [len(document) for document in self._shards[shard]]

    def open(self, shard: str, offset: int) -> Iterator[Sequence[int]]:
        self.opened.append((shard, offset))
        return iter(self._shards[shard][offset:])


class Unsized:
    """A source that can only be read: the documents of another one."""

    def __init__(self, inner: Documents) -> None:
        self._inner = inner
        self.shards = inner.shards

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        return self._inner.open(shard, offset)


class Start:
    """One start of a run."""

    def __init__(self, sources: Mapping[str, Source], world: int, batch_size: int, **options: Any) -> None:
        options = {"shuffle": False, "collate_fn": list} | options
        self.world = world
        self.streams = [
            ResumableStream(sources, batch_size, rank=rank, world=world, **options) for rank in range(world)
        ]

    @property
    def states(self) -> list[dict[str, Any]]:
        return [stream.state_dict() for stream in self.streams]

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        for rank, stream in enumerate(self.streams):
            stream.load_state_dict(stream.reshape_state(states, rank=rank, world=self.world))

    def train(self, steps: int, iterations: int = 1000) -> list[Any]:
        """Go on for so many steps, over ends; what all ranks were given, in order."""
        given: list[Any] = []
        while steps and iterations:
            for batches in zip(*(iter(stream) for stream in self.streams), strict=True):
                assert all(len(batch) for batch in batches), "every rank has a sample in every step"
                given += [sample for batch in batches for sample in batch]
                if not (steps := steps - 1):
                    return given
            iterations -= 1
        return given


def flat(sequences: Sequence[Any]) -> list[int]:
    """Their tokens."""
    return [int(token) for sequence in sequences for token in np.asarray(sequence).reshape(-1)]
