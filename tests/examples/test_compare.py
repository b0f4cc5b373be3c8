"""The demo's comparison can fail: one bit is enough."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.demo.compare import FINAL_NAME, LOG_NAME, differences

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A reference, and an equal run in two lives that did step 3 twice."""
    reference, other = tmp_path / "reference", tmp_path / "other"
    reference.mkdir()
    _log(reference, [1, 2, 3, 4])
    save_file({"weight": torch.arange(6.0).view(2, 3), "nan": torch.tensor(float("nan"))}, reference / FINAL_NAME)
    shutil.copytree(reference, other)
    _log(other, [1, 2, 3, 3, 4])
    return reference, other


def _log(folder: Path, steps: list[int], losses: dict[int, float] | None = None) -> None:
    found = [{"event": "step", "step": step, "loss": (losses or {}).get(step, 1 / step)} for step in steps]
    (folder / LOG_NAME).write_text("".join(json.dumps(event) + "\n" for event in found))


def test_equal_runs_are_equal(runs: tuple[Path, Path]) -> None:
    assert differences(*runs) == []


def test_one_bit_of_one_loss_is_seen(runs: tuple[Path, Path]) -> None:
    _log(runs[1], [1, 2, 3, 3, 4], {3: 1 / 3 + 2**-54})
    assert [text.split(":")[0] for text in differences(*runs)] == ["step 3", "step 3"]


def test_a_step_that_was_left_out_or_added_is_seen(runs: tuple[Path, Path]) -> None:
    _log(runs[1], [1, 2, 4])
    assert differences(*runs) == ["steps [3] were never done"]
    _log(runs[1], [1, 2, 3, 4, 5])
    assert [text.split(":")[0] for text in differences(*runs)] == ["step 5"]


def test_one_bit_of_one_weight_ends_the_command_with_1(runs: tuple[Path, Path]) -> None:
    tensors = load_file(runs[1] / FINAL_NAME)
    tensors["weight"].view(torch.int32)[1, 1] ^= 1
    save_file(tensors, runs[1] / FINAL_NAME)
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo.compare", *runs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (1, "weight: 1 bytes differ"), done.stderr


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_another_dtype_or_name_is_seen(runs: tuple[Path, Path], dtype: torch.dtype) -> None:
    tensors = load_file(runs[1] / FINAL_NAME)
    save_file(tensors | {"weight": tensors["weight"].to(dtype)}, runs[1] / FINAL_NAME)
    assert len(differences(*runs)) == 1
    save_file({"weight": tensors["weight"]}, runs[1] / FINAL_NAME)
    assert differences(*runs) == ["other tensors: ['nan']"]


def test_nothing_compared_is_not_equal(runs: tuple[Path, Path]) -> None:
    for folder in runs:
        _log(folder, [])
        save_file({}, folder / FINAL_NAME)
    assert differences(*runs) == ["the reference has no steps", "the reference has no tensors"]
