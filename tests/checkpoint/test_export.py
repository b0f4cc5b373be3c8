"""An export that safetensors alone can read, complete or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptd.checkpoint import export as exporting
from ckptd.checkpoint.export import Exported, export
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.run import Run
from ckptd.errors import IntegrityError, StorageError, UsageError
from ckptd.format.keys import Version
from ckptd.format.records import Box
from tests.checkpoint.builder import (
    Held,
    State,
    flip,
    make_checkpoint,
    only_key,
    open_generation,
    pattern,
    tamper,
    tensor,
)


async def _export(run: Run, folder: Path, *states: State) -> Exported:
    version = Version(10, await open_generation(run, world=len(states)))
    await make_checkpoint(run, version, states, metrics={"loss": 0.5})
    async with await CheckpointReader.open(run, version) as reader:
        return await export(reader, folder)


def _read(folder: Path) -> dict[str, Any]:
    """Every file's tensors or JSON, by its name."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        found[path.name] = load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
    return found


async def test_one_rank(run: Run, tmp_path: Path) -> None:
    state = State(
        [
            tensor("model/w", (3, 4)),
            tensor("model/b", (), dtype="float64", salt=2),
            tensor("model/none", (0, 4)),
            tensor("optimizer/c", (2,), dtype="complex64", salt=3, per_rank=True),
            tensor("lonely", (5,), dtype="int8"),
            tensor("odd ~1 name/x", (1,)),
        ],
        {"epoch": 3},
        {"model/tied": "model/w"},
    )
    done = await _export(run, tmp_path / "out", state)
    found = _read(tmp_path / "out")
    assert sorted(done.files) == sorted(found)
    assert sorted(found["model.safetensors"]) == ["b", "none", "tied", "w"]
    assert found["model.safetensors"]["w"].tobytes() == found["model.safetensors"]["tied"].tobytes() == pattern(48)
    assert found["model.safetensors"]["b"].tobytes() == pattern(8, 2)
    assert found["model.safetensors"]["none"].shape == (0, 4)
    assert found["optimizer.safetensors"]["c"].view(np.complex64).tobytes() == pattern(16, 3)
    assert found["lonely.safetensors"]["lonely"].tobytes() == pattern(5)
    assert list(found["part-002.safetensors"]) == ["x"]
    assert found["state.json"] == {"$": "dict", "v": [["epoch", 3]]}
    about = found["export.json"]
    assert (about["step"], about["generation"], about["world"], about["metrics"]) == (10, 1, 1, {"loss": 0.5})
    assert about["stored_as_bytes"] == {"optimizer/c": "complex64"}


async def test_several_ranks(run: Run, tmp_path: Path) -> None:
    whole = pattern(64 * 4)
    columns = [b"".join(whole[r * 32 + c * 16 : r * 32 + c * 16 + 16] for r in range(8)) for c in range(2)]
    states = [
        State(
            [
                Held("m/w", (8, 8), columns[rank], box=Box((0, rank * 4), (8, 4))),
                tensor("m/own", (3,), salt=rank, per_rank=True),
            ],
            {"rank": rank},
        )
        for rank in range(2)
    ]
    await _export(run, tmp_path / "out", *states)
    found = _read(tmp_path / "out")
    assert found["m.safetensors"]["w"].tobytes() == whole
    for rank in range(2):
        assert found[f"m.rank-0000{rank}.safetensors"]["own"].tobytes() == pattern(12, rank)
        assert found[f"state.rank-0000{rank}.json"]["v"] == [["rank", rank]]


async def test_large_parts_are_cut_and_indexed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "FILE_BYTES_MAX", 100)
    monkeypatch.setattr(exporting, "EXPORT_WINDOW_BYTES", 28)
    await _export(run, tmp_path / "out", State([tensor(f"m/t{i}", (3, 4), salt=i) for i in range(5)]))
    found = _read(tmp_path / "out")
    index = found["m.safetensors.index.json"]
    assert index["metadata"] == {"total_size": 5 * 48}
    assert sorted(set(index["weight_map"].values())) == [f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert found[file][name].tobytes() == pattern(48, int(name[1:]))


async def test_a_folder_that_holds_something_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not an empty folder"):
        await _export(run, tmp_path / "out", State([tensor("w", (3,))]))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    await _export(run, tmp_path / "empty", State([tensor("w", (3,))]))
    assert (tmp_path / "empty" / "w.safetensors").exists()


async def test_damage_leaves_nothing(run: Run, tmp_path: Path) -> None:
    version = Version(10, await open_generation(run))
    await make_checkpoint(run, version, State([tensor("w", (3,)), tensor("x", (3,))]))
    await tamper(run.backend, await only_key(run.backend, "checkpoints/", ".safetensors"), flip(-1))
    async with await CheckpointReader.open(run, version) as reader:
        with pytest.raises(IntegrityError):
            await export(reader, tmp_path / "out")
    assert os.listdir(tmp_path) == []


async def test_a_place_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot export to"):
        await _export(run, tmp_path / "file" / "out", State([tensor("w", (3,))]))
