"""Family (i): what people see and use."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import newest_good, verify
from ckptd.errors import CkptdError, MismatchError, NoCheckpoint
from ckptd.format.keys import Version
from ckptd.limits import MIB
from ckptd.storage import open_backend
from ckptd_client import open_checkpoint
from ckptd_client.capture.state import State as LiveState
from ckptd_client.committed import CommittedCheckpoint
from ckptd_client.roots import Root
from tests.checkpoint.builder import (
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

CKPTD = Path(sysconfig.get_path("scripts")) / "ckptd"
FALLBACK_EXIT = 13


def _ckptd(*arguments: object, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [CKPTD, *map(str, arguments)]
    if limit_bytes is not None:
        command = ["prlimit", f"--data={limit_bytes}", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


async def _made(url: str, steps: list[int]) -> list[Version]:
    backend = open_backend(url)
    made = await make_run(await Run.open(backend, create=True), steps)
    await backend.aclose()
    return made


@pytest.fixture
def made(tmp_run: str) -> tuple[str, list[Version]]:
    """A run on disk with two checkpoints."""
    return tmp_run, asyncio.run(_made(tmp_run, [10, 20]))


# R174: a flipped bit is noticed wherever it is


async def test_r174_one_bit_in_any_object_is_noticed(tmp_run: str) -> None:
    backend = open_backend(tmp_run)
    run = await Run.open(backend, create=True)
    (version,) = await make_run(run, [10])
    whole = {key: await backend.get(key, limit_bytes=1 << 30) for key in await keys_of(backend)}
    places = {
        "run.json": (b'"run":"',),
        "generations/000001.json": (b'"kind":"', b'"world":', b'"launch":"', b'"opened_from":'),
        "manifests/000000000010-g000001.json": (b'"digest":"', b'"chunks":[', b'"shape":[', b'"dtype":"', b'"step":'),
        "receipt": (b'"blocks":"', b'"at":', b'"shape":[', b'"lr",'),
        "shard": (b'"data_offsets":[', 4096, 1_500_000, -1),
    }
    for key, data in whole.items():
        kind = "shard" if key.endswith(".safetensors") else "receipt" if key.startswith("checkpoints/") else key
        for place in places[kind]:
            await tamper(backend, key, flip(place))
            with pytest.raises(CkptdError):
                await _read_all(tmp_run)
            assert not await _verifies(tmp_run, version), (key, place)
            await backend.put(key, data)
    await _read_all(tmp_run)
    assert await _verifies(tmp_run, version)
    await backend.aclose()


async def _verifies(url: str, version: Version) -> bool:
    backend = open_backend(url)
    try:
        return (await verify(await Run.open(backend), version)).good
    except CkptdError:
        return False
    finally:
        await backend.aclose()


async def _read_all(url: str) -> None:
    """What a careful reader does: prove the checkpoint, then read every tensor and value."""

    def read() -> None:
        with open_checkpoint(url) as view:
            _ = view.tree
            for name in view:
                view[name].tensor()

    if not await _verifies(url, Version(10, 1)):
        raise CkptdError("not proved")
    await asyncio.to_thread(read)


# R175: an error that says what, where, and what to do


@pytest.mark.parametrize("damage", ["one byte short", "header zeroed", "gone"])
def test_r175_a_damaged_shard_is_named_with_what_to_do(made: tuple[str, list[Version]], damage: str) -> None:
    url, _ = made

    async def break_it() -> str:
        backend = open_backend(url)
        key = await only_key(backend, "checkpoints/000000000020-g000001/", ".safetensors")
        if damage == "gone":
            await backend.delete([key])
        elif damage == "one byte short":
            await tamper(backend, key, lambda data: data.pop())
        else:
            await tamper(backend, key, lambda data: data.__setitem__(slice(0, 100), bytes(100)))
        await backend.aclose()
        return key

    key = asyncio.run(break_it())
    if damage != "header zeroed":  # which reads of single tensors do not need
        with open_checkpoint(url) as view, pytest.raises(CkptdError) as error:
            view["model/bias"].tensor()
        assert key in error.value.message
        assert "ckptd verify" in error.value.hint
    done = _ckptd("verify", url)
    assert done.returncode == FALLBACK_EXIT
    assert key in done.stdout
    assert "good     10-g1" in done.stdout
    expected = {"one byte short": "promises", "gone": "is missing", "header zeroed": "the shard's header"}
    assert expected[damage] in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# R165: the newest is damaged


async def test_r165_the_newest_good_one_is_found_and_the_reason_told(tmp_run: str) -> None:
    made = await _made(tmp_run, [10, 20, 30])
    backend = open_backend(tmp_run)
    run = await Run.open(backend)
    for version in made[1:]:
        key = await only_key(backend, f"checkpoints/{version}/", ".safetensors")
        await tamper(backend, key, flip(100_000))
    choice = await newest_good(run)
    await backend.aclose()
    assert choice.version == made[0]
    assert [item.version for item in choice.tried] == [made[2], made[1], made[0]]
    assert all("of tensor 'model/weight', differ from their digest" in item.reason for item in choice.tried[:2])
    done = await asyncio.to_thread(_ckptd, "verify", tmp_run, "--json")
    assert done.returncode == FALLBACK_EXIT
    assert json.loads(done.stdout)["good"] == "10-g1"


# R177: export streams


@pytest.fixture
def large(tmp_run: str) -> str:
    """A run with a checkpoint of 400 MB, one tensor of it 240 MB."""

    async def make() -> None:
        backend = open_backend(tmp_run)
        run = await Run.open(backend, create=True)
        state = State([tensor("m/large", (240 * MIB // 4,)), *(tensor(f"m/t{i}", (10 * MIB,)) for i in range(4))])
        await make_checkpoint(run, Version(1, await open_generation(run)), state)
        await backend.aclose()

    asyncio.run(make())
    return tmp_run


def test_r177_400_mb_are_exported_in_200_mb_of_memory(large: str, tmp_path: Path) -> None:
    done = _ckptd("export", large, "latest", tmp_path / "out", limit_bytes=200_000_000)
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "out" / "m.safetensors", framework="pt") as file:
        assert file.get_tensor("large").view(torch.uint8)[-1000:].numpy().tobytes() == pattern(240 * MIB)[-1000:]


# R183: which checkpoint


async def test_r183_several_runs_in_one_place_are_told_apart(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/runs"
    gpt, bert = await _made(f"{place}/gpt", [10, 20]), await _made(f"{place}/bert", [10])
    backends = [open_backend(url) for url in (f"{place}/gpt", f"{place}/bert", place)]
    first, second = [await Run.open(backend) for backend in backends[:2]]
    assert first.id != second.id
    assert await first.resolve("latest") == gpt[1]
    assert await second.resolve("latest") == bert[0]
    assert await first.resolve("10") == await first.resolve("10-g1") == gpt[0]
    with pytest.raises(NoCheckpoint) as error:
        await Run.open(backends[2])
    assert error.value.hint == "runs lie below it: bert, gpt"
    with pytest.raises(NoCheckpoint) as error:
        await second.resolve(20)
    assert error.value.hint == "there are 10-g1"
    for backend in backends:
        await backend.aclose()


async def test_r183_a_new_start_overwrites_nothing(tmp_run: str) -> None:
    await _made(tmp_run, [10, 20])
    backend = open_backend(tmp_run)
    before = {key: await backend.get(key, limit_bytes=1 << 30) for key in await keys_of(backend)}
    again = await _made(tmp_run, [10])
    assert again == [Version(10, 2)]
    assert {key: await backend.get(key, limit_bytes=1 << 30) for key in before} == before
    await backend.aclose()


# R181: a part is missing


async def test_r181_missing_parts_are_named_before_anything_is_touched(tmp_run: str) -> None:
    backend = open_backend(tmp_run)
    run = await Run.open(backend, create=True)
    version = Version(10, await open_generation(run))
    weights_only = State([tensor("model/w", (3,))], {"model": {"w": TensorRef("model/w")}})
    assert (await make_checkpoint(run, version, weights_only)).parts == ("model",)
    await backend.aclose()
    weight, momentum = torch.zeros(3), torch.zeros(3)
    live = LiveState({"model": {"w": weight}, "optimizer": {"m": momentum}}, world=1, rng=False)
    stored = CommittedCheckpoint(Root(tmp_run, {}, "launch"), version, rank=0, world=1)
    with pytest.raises(MismatchError, match="optimizer"):
        live.prepare(stored, strict=True)
    assert not weight.any()
    prepared = live.prepare(stored, strict=False)
    stored.close()
    assert any(name.startswith("optimizer") for name in prepared.report.missing)
    prepared.apply()
    assert weight.numpy().tobytes() == pattern(12)
    assert not momentum.any()
