"""Are two runs equal, bit for bit? ``python -m examples.demo.compare REFERENCE_FOLDER FOLDER`` ends with 1 if not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LOG_NAME = "log.jsonl"
FINAL_NAME = "final.safetensors"


def events(folder: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """What the trainer in ``folder`` has logged of these kinds, over all of its lives, in order."""
    path = folder / LOG_NAME
    if path.exists():
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] in kinds:
                yield event


def differences(reference: Path, folder: Path) -> list[str]:
    """Where the run in ``folder`` differs from the reference, in words; empty where it does not.

    Compared are the loss of every step, those that were done twice included, and the bits of every final tensor.
    """
    return [*_loss_differences(reference, folder), *_tensor_differences(reference, folder)]


def _loss_differences(reference: Path, folder: Path) -> Iterator[str]:
    expected = {event["step"]: event["loss"] for event in events(reference, "step")}
    reached: set[int] = set()
    for event in events(folder, "step"):
        step, loss = event["step"], event["loss"]
        reached.add(step)
        if step not in expected or loss != expected[step]:
            yield f"step {step}: the loss is {loss!r}, and {expected.get(step)!r} without ckptd"
    if missing := expected.keys() - reached:
        yield f"steps {sorted(missing)} were never done"
    if not expected:
        yield "the reference has no steps"


def _tensor_differences(reference: Path, folder: Path) -> Iterator[str]:
    expected, found = load_file(reference / FINAL_NAME), load_file(folder / FINAL_NAME)
    if expected.keys() != found.keys():
        yield f"other tensors: {sorted(expected.keys() ^ found.keys())}"
    if not expected:
        yield "the reference has no tensors"
    for name in expected.keys() & found.keys():
        left, right = expected[name], found[name]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            yield f"{name}: {right.dtype} {tuple(right.shape)}, and {left.dtype} {tuple(left.shape)} without ckptd"
        elif not torch.equal(_bits(left), _bits(right)):
            yield f"{name}: {int((_bits(left) != _bits(right)).sum())} bytes differ"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]), Path(sys.argv[2]))
    print(*(found or ["equal, bit for bit"]), sep="\n")
    sys.exit(1 if found else 0)
