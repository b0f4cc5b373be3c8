"""Whatever is damaged, verifying finds it; and what is good stays reachable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import newest_good, verify
from ckptd.errors import AccessDenied, NoCheckpoint, NotFound, Unavailable
from ckptd.format import index
from ckptd.format.keys import Version
from ckptd.storage import Backend, ObjectInfo
from ckptd_backends.wrappers.base import Wrapper
from tests.checkpoint.builder import (
    State,
    keys_of,
    make_checkpoint,
    make_run,
    open_generation,
    tamper,
    tensor,
)

Damage = Callable[[Backend, str, str], Awaitable[object]]


@pytest.fixture
async def checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Version]:
    """Two ranks, an index in two parts."""
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", 10)
    monkeypatch.setattr(index, "INDEX_PART_BYTES_TARGET", 150)
    version = Version(10, await open_generation(run, world=2))
    states = [State([tensor(f"m/t{r}", (300, 1000), salt=r), tensor(f"m/s{r}", (3,))], {"rank": r}) for r in range(2)]
    await make_checkpoint(run, version, states, metrics={"loss": 0.5})
    return run, version


async def test_good(checkpoint: tuple[Run, Version]) -> None:
    run, version = checkpoint
    progress: list[tuple[int, int]] = []
    found = await verify(run, version, on_progress=lambda done, total: progress.append((done, total)))
    assert found.good
    assert found.reason == ""
    assert [finding.subject for finding in found.findings] == ["generation", "proof", "rank 0", "rank 1"]
    assert progress[-1] == (found.bytes_verified, found.bytes_verified)
    assert progress == sorted(progress)


async def _missing(backend: Backend, key: str, other: str) -> None:
    await backend.delete([key])


async def _shorter(backend: Backend, key: str, other: str) -> None:
    await tamper(backend, key, lambda data: data.pop())


async def _longer(backend: Backend, key: str, other: str) -> None:
    await tamper(backend, key, lambda data: data.append(32))


async def _empty(backend: Backend, key: str, other: str) -> None:
    await tamper(backend, key, lambda data: data.clear())


async def _swapped(backend: Backend, key: str, other: str) -> None:
    first, second = [await backend.get(k, limit_bytes=1 << 30) for k in (key, other)]
    await backend.put(key, second)
    await backend.put(other, first)


def _flipped(part: float) -> Damage:
    async def flip(backend: Backend, key: str, other: str) -> None:
        def change(data: bytearray) -> None:
            data[int(part * (len(data) - 1))] ^= 4

        await tamper(backend, key, change)

    return flip


@pytest.mark.parametrize(
    "damage",
    [_missing, _shorter, _longer, _empty, _swapped, _flipped(0.0), _flipped(0.3), _flipped(0.6), _flipped(1.0)],
)
async def test_every_damage_to_every_object_is_found(checkpoint: tuple[Run, Version], damage: Damage) -> None:
    run, version = checkpoint
    keys = [key for key in await keys_of(run.backend, "checkpoints/")]
    kinds = ("index-00000.json", "index-00001.json", "00000-of-00002.json", "00001-of-00002.json", ".safetensors")
    assert all(any(key.endswith(kind) for key in keys) for kind in kinds)
    objects = {key: await run.backend.get(key, limit_bytes=1 << 30) for key in await keys_of(run.backend)}
    # What no proof covers: the host and process of a generation are told, not used; a longer JSON may be spaces.
    for number, key in enumerate(keys):
        await damage(run.backend, key, keys[number - 1])
        found = await verify(run, version)
        assert not found.good, key
        for name, data in objects.items():
            await run.backend.put(name, data)
    assert (await verify(run, version)).good


@pytest.mark.parametrize("text", [b'"step":', b'"bytes":', b'"loss":', b'"launch":"', b'"world":', b'"parts":["'])
async def test_every_change_of_the_manifest_is_found(checkpoint: tuple[Run, Version], text: bytes) -> None:
    run, version = checkpoint
    await tamper(run.backend, f"manifests/{version}.json", lambda data: _bump(data, text))
    found = await verify(run, version)
    assert not found.good
    assert f"manifests/{version}.json" in found.reason


@pytest.mark.parametrize("text", [b'"world":', b'"launch":"'])
async def test_a_generation_that_disagrees_is_found(checkpoint: tuple[Run, Version], text: bytes) -> None:
    run, version = checkpoint
    await tamper(run.backend, "generations/000001.json", lambda data: _bump(data, text))
    assert "disagree on launch, world or parent" in (await verify(run, version)).reason
    await run.backend.delete(["generations/000001.json"])
    assert "generations/000001.json is missing" in (await verify(run, version)).reason


def _bump(data: bytearray, text: bytes) -> None:
    """Makes another digit or letter of the first one behind the text."""
    data[data.index(text) + len(text)] ^= 1


async def test_newest_good_falls_back_and_says_why(run: Run) -> None:
    versions = await make_run(run, [10, 20, 30, 40])
    keys = await keys_of(run.backend, f"checkpoints/{versions[3]}/")
    await run.backend.delete([keys[0]])
    await tamper(run.backend, f"manifests/{versions[2]}.json", lambda data: data.clear())
    choice = await newest_good(run)
    assert choice.version == versions[1]
    assert [item.version for item in choice.tried] == [versions[3], versions[2], versions[1]]
    assert "is missing" in choice.tried[0].reason
    assert "not a record" in choice.tried[1].reason
    assert choice.tried[2].good


async def test_nothing_good(run: Run) -> None:
    assert (await newest_good(run)).tried == ()
    versions = await make_run(run, [10, 20])
    for version in versions:
        await run.backend.delete(await keys_of(run.backend, f"checkpoints/{version}/"))
    choice = await newest_good(run)
    assert choice.version is None
    assert len(choice.tried) == 2
    with pytest.raises(NoCheckpoint):
        await verify(run, Version(99, 1))


@pytest.mark.parametrize("error", [AccessDenied, Unavailable])
async def test_cannot_tell_is_no_verdict(run: Run, error: type[Exception]) -> None:
    class Refusing(Wrapper):
        async def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
            raise error("no")

    await make_run(run, [10, 20])
    with pytest.raises(error):
        await newest_good(Run(Refusing(run.backend), run.id))


async def test_what_is_deleted_while_it_is_verified_is_a_finding(run: Run) -> None:
    """As retention does: each byte was read, and then the shard is gone."""

    class Gone(Wrapper):
        async def head(self, key: str) -> ObjectInfo:
            if key.endswith(".safetensors"):
                raise NotFound("no such object", key=key)
            return await self.inner.head(key)

    (version,) = await make_run(run, [10])
    found = await verify(Run(Gone(run.backend), run.id), version)
    assert not found.good
    assert "is missing" in found.reason
