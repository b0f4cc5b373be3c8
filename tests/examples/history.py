"""What the ranks of ``examples.elastic`` have logged over all of their lives, and what must be true of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any


class History:
    """The logs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def log(self, generation: int, rank: int = 0) -> list[dict[str, Any]]:
        """Of one life of one rank. Its last line may be cut off by a kill."""
        path = self._folder / f"g{generation:05d}.{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def worlds(self) -> list[int]:
        """How many ranks each life had."""
        found = Counter(path.name.split(".")[0] for path in self._folder.glob("g*.jsonl"))
        return [count for _, count in sorted(found.items())]

    def check_hand_over(self, generation: int) -> None:
        """Every bit that a life began with is as the last one before it had it, at the same step."""
        start, state = self.log(generation)[:2]
        assert start["step"] > 0
        assert state["event"] == "state"
        for before in range(generation - 1, 0, -1):
            for event in self.log(before)[2:]:
                if event["event"] == "state" and event["step"] == start["step"]:
                    assert state["digests"] == event["digests"]
                    return
        raise AssertionError(f"no life before {generation} did step {start['step']}")

    def check_samples(self, worlds: list[int], windows: int) -> int:
        """Of each step its last life counts. Each sample of an epoch of so many is in one batch of it, or, of the last
        one, in none. Returns the number of steps."""
        history: dict[int, tuple[int, list[int]]] = {}
        for generation, world in enumerate(worlds, 1):
            steps: dict[int, dict[int, dict[str, Any]]] = {}
            for rank in range(world):
                start, *events = self.log(generation, rank)
                for event in events:
                    if event["event"] == "step":
                        assert math.isfinite(event["loss"])
                        same = steps.setdefault(event["step"], {}).setdefault(start["data_rank"], event)
                        assert (same["samples"], same["epoch"]) == (event["samples"], event["epoch"])  # of one pair
            for step, of_ranks in steps.items():
                (epoch,) = {event["epoch"] for event in of_ranks.values()}
                history[step] = epoch, [sample for event in of_ranks.values() for sample in event["samples"]]
        assert sorted(history) == list(range(1, len(history) + 1))
        epochs: dict[int, Counter[int]] = {}
        for epoch, samples in history.values():
            epochs.setdefault(epoch, Counter()).update(samples)
        last = epochs.pop(max(epochs))
        assert epochs == {epoch: Counter(range(windows)) for epoch in epochs}
        assert set(last.values()) == {1}
        assert len(epochs) >= 2
        return len(history)
