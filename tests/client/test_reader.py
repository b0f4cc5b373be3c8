"""A checkpoint as a lazy mapping."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from ckptd.checkpoint.run import Run
from ckptd.errors import IntegrityError, NoCheckpoint, UsageError
from ckptd.format.keys import LEASES, Version
from ckptd.format.records import Box
from ckptd.storage import open_backend
from ckptd_client import open_checkpoint
from ckptd_client.reader import CheckpointView, TensorView
from tests.checkpoint.builder import (
    Held,
    State,
    TensorRef,
    flip,
    keys_of,
    make_checkpoint,
    make_run,
    only_key,
    open_generation,
    pattern,
    tamper,
    tensor,
)


def _make(url: str, *states: State) -> None:
    async def make() -> None:
        backend = open_backend(url)
        run = await Run.open(backend, create=True)
        version = Version(10, await open_generation(run, world=len(states)))
        await make_checkpoint(run, version, states, metrics={"loss": 0.5})
        await backend.aclose()

    asyncio.run(make())


def _bits(dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(bytearray(pattern(size, salt)), dtype=torch.uint8).view(dtype).reshape(shape)


WHOLE = _bits(torch.int32, (40, 30, 20))


@pytest.fixture
def view(tmp_run: str) -> Iterator[CheckpointView]:
    """A checkpoint of one rank."""
    _make(
        tmp_run,
        State(
            [
                tensor("model/w", (40, 30, 20), dtype="int32"),
                tensor("model/scalar", (), dtype="float64"),
                tensor("model/empty", (0, 3), dtype="bfloat16"),
                tensor("model/flags", (5,), dtype="complex64"),
                tensor("own", (4,), dtype="int8", per_rank=True),
            ],
            {"model": {"w": TensorRef("model/w")}, "epoch": 3, "history": [1.5, (2, b"x")], "own": TensorRef("own")},
            {"model/tied": "model/w"},
        ),
    )
    with open_checkpoint(tmp_run) as view:
        yield view


def test_mapping(view: CheckpointView) -> None:
    assert list(view) == ["model/empty", "model/flags", "model/scalar", "model/tied", "model/w", "own"]
    assert len(view) == 6
    assert "model/w" in view
    assert "nope" not in view
    with pytest.raises(KeyError, match="nope: no such tensor"):
        view["nope"]
    assert (view.step, view.version, view.metrics) == (10, Version(10, 1), {"loss": 0.5})
    assert view["model/w"].shape == (40, 30, 20)
    assert view["model/w"].dtype == torch.int32
    assert len(view["model/w"]) == 40
    assert view["model/scalar"].tensor().shape == ()
    assert view["model/scalar"][...].view(torch.int64) == _bits(torch.int64, ())
    assert view["model/empty"].tensor().shape == (0, 3)
    assert view["model/flags"].tensor().dtype == torch.complex64
    assert view["model/tied"].tensor().equal(WHOLE)
    assert view["own"][1:3].equal(_bits(torch.int8, (4,))[1:3])


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        slice(5, 9),
        slice(None, None, 7),
        (slice(2, 30, 5), 4),
        (..., 3),
        (1, ..., slice(3, None)),
        (1, 2, 3),
        (slice(None), slice(-4, -1), slice(100, 3)),
        ...,
        (),
    ],
)
def test_parts_are_as_torch_indexes(view: CheckpointView, index: object) -> None:
    assert view["model/w"][index].equal(WHOLE[index])  # type: ignore[index]


@pytest.mark.parametrize(
    ("index", "error"), [(40, IndexError), ((1, 2, 3, 4), IndexError), ([1], TypeError), (slice(3, 1, -1), ValueError)]
)
def test_other_indices_are_refused(view: CheckpointView, index: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        view["model/w"][index]  # type: ignore[index]


def test_tree(view: CheckpointView) -> None:
    tree = view.tree
    assert tree["epoch"] == 3
    assert tree["history"] == [1.5, (2, b"x")]
    assert isinstance(tree["model"]["w"], TensorView)
    assert tree["own"].tensor().equal(_bits(torch.int8, (4,)))


async def test_works_inside_a_running_loop(tmp_run: str) -> None:
    await asyncio.to_thread(_make, tmp_run, State([tensor("w", (3,), dtype="int8")]))
    with open_checkpoint(tmp_run) as view:
        assert view["w"].tensor().equal(_bits(torch.int8, (3,)))


def test_several_ranks(tmp_run: str) -> None:
    whole = _bits(torch.int32, (6, 8))
    states = [
        State(
            [
                Held("w", (6, 8), whole[:, 4 * r : 4 * r + 4].numpy().tobytes(), "int32", box=Box((0, 4 * r), (6, 4))),
                tensor("own", (2,), dtype="int8", salt=r, per_rank=True),
            ],
            {"rank": r},
        )
        for r in range(2)
    ]
    _make(tmp_run, *states)
    with open_checkpoint(tmp_run) as view:
        assert list(view) == ["w"]
        assert view["w"].tensor().equal(whole)
        assert view["w"][2:4, 3:6].equal(whole[2:4, 3:6])
        with pytest.raises(UsageError, match="each of 2 ranks"):
            _ = view.tree
    with open_checkpoint(tmp_run, rank=1) as view:
        assert list(view) == ["own", "w"]
        assert view["own"].tensor().equal(_bits(torch.int8, (2,), 1))
        assert view.tree == {"rank": 1}
    with pytest.raises(UsageError):
        open_checkpoint(tmp_run, rank=2)


def test_reads_only_what_is_touched_and_verifies_it(tmp_run: str) -> None:
    _make(tmp_run, State([tensor("good", (300, 1000)), tensor("rotten", (300, 1000))]))

    async def damage() -> None:
        backend = open_backend(tmp_run)
        await tamper(backend, await only_key(backend, "checkpoints/", ".safetensors"), flip(-1))
        await backend.aclose()

    asyncio.run(damage())
    with open_checkpoint(tmp_run) as view:
        assert view["good"].tensor().view(torch.int32).equal(_bits(torch.int32, (300, 1000)))
        assert view["rotten"][:5].view(torch.int32).equal(_bits(torch.int32, (300, 1000))[:5])
        with pytest.raises(IntegrityError, match="of tensor 'rotten'"):
            view["rotten"][-1]


def test_reading_changes_nothing_of_the_run(tmp_run: str) -> None:
    async def make() -> list[str]:
        backend = open_backend(tmp_run)
        await make_run(await Run.open(backend, create=True), [10, 20])
        keys = await keys_of(backend)
        await backend.aclose()
        return keys

    async def look() -> list[str]:
        backend = open_backend(tmp_run)
        keys = await keys_of(backend)
        await backend.aclose()
        return keys

    before = asyncio.run(make())
    with open_checkpoint(tmp_run, 10) as view:
        assert view.step == 10
        held = set(asyncio.run(look())) - set(before)
        assert all(key.startswith(f"{LEASES}reader-") for key in held)
        assert held
    assert asyncio.run(look()) == before
    with pytest.raises(NoCheckpoint):
        open_checkpoint(tmp_run, 99)
    with pytest.raises(NoCheckpoint):
        open_checkpoint(f"{tmp_run}-not-there")
    assert asyncio.run(look()) == before
