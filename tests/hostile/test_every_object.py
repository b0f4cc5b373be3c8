"""Any single object of a checkpoint is damaged in any way: it is noticed, named and passed over, and nothing of it is
executed. A value that is restored is the right one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.checkpoint.run import Run
from ckptd.checkpoint.verify import verify
from ckptd.errors import CkptdError, FormatError, IntegrityError
from ckptd.format.keys import Version
from ckptd.storage import open_backend
from ckptd_client import Checkpointer
from devtools.processes import kill_group, spawn
from tests.client.conftest import Daemon
from tests.hostile.damages import changed, flip, put_bomb, swap, truncate
from tests.hostile.saving import NEW, OLD, new_state, save_as


def _is_of(state: dict[str, Any], step: int) -> bool:
    """Untouched is of step 0."""
    model = list(state["model"].values())
    wanted = [100 * step + number if step else 0 for number in range(len(model))]
    return state["more"]["step"] == step and all(map(lambda t, n: bool((t == n).all()), model, wanted))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, daemon: Daemon) -> Path:
    """A run of two ranks with two checkpoints, in which there is an object of each kind."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    other = spawn([sys.executable, "-m", "tests.hostile.saving", f"file://{folder}", daemon.socket])
    try:
        save_as(0, f"file://{folder}", daemon.socket)
        assert other.wait(60) == 0
    finally:
        kill_group(other)
    shutil.rmtree(folder / "agreement", ignore_errors=True)
    shutil.copy(next(folder.glob("marks/*/pinned-*.json")), folder / "marks" / str(Version(NEW, 1)) / "verified-x.json")
    return folder


NEEDED = {
    "manifest": f"manifests/{Version(NEW, 1)}.json",
    "receipt": f"checkpoints/{Version(NEW, 1)}/rank-00000-of-00002.json",
    "shard": f"checkpoints/{Version(NEW, 1)}/rank-00000-of-00002-*.safetensors",
    "shard of another rank": f"checkpoints/{Version(NEW, 1)}/rank-00001-of-00002-*.safetensors",
    "index": f"checkpoints/{Version(NEW, 1)}/index-00000.json",
    "common": f"checkpoints/{Version(NEW, 1)}/common.json",
}
"""Without which there is no checkpoint."""
BESIDE = {
    "run": "run.json",
    "generation": "generations/000001.json",
    "mark": f"marks/{Version(NEW, 1)}/verified-x.json",
    "pin": f"marks/{Version(NEW, 1)}/pinned-*.json",
}

Damage = Callable[[Path, Path], Path | None]
"""Of an object of the run in a folder; another one that was damaged as well."""


def _remove(path: Path, _: Path) -> None:
    path.unlink()


def _swap(path: Path, root: Path) -> Path:
    """With an object of the same checkpoint or, of the manifest, with the other one."""
    others = {
        *root.glob(f"checkpoints/{Version(NEW, 1)}/*"),
        *root.glob("manifests/*"),
        *root.glob("generations/*"),
        *root.glob("marks/*/*"),
    }
    other = min(others - {path}, key=lambda found: (found.parent != path.parent, found.suffix != path.suffix, found))
    swap(path, other)
    return other


DAMAGES: dict[str, Damage] = {
    "removed": _remove,
    "flipped": changed(flip),
    "truncated": changed(truncate),
    "extended": changed(lambda data: data.extend(b"}" * 100)),
    "swapped": _swap,
    "a pickle": put_bomb,
}


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Iterator[Path]:
    """One to damage."""
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    yield root
    assert not (root / "exploded").exists(), "something of it was executed"


async def _verified(root: Path) -> str:
    """Why it is bad; empty where it is good."""
    async with contextlib.aclosing(open_backend(f"file://{root}")) as backend:
        try:
            return (await verify(await Run.open(backend), Version(NEW, 1))).reason
        except CkptdError as error:
            return str(error)


def _restored(root: Path, daemon: Daemon) -> tuple[int, str]:
    """By one rank: the step, and what is said beside."""
    state = new_state()
    with Checkpointer(f"file://{root}", state, socket=daemon.socket, replicated=True, rng=False) as ckpt:
        try:
            restored = ckpt.restore()
        except (IntegrityError, FormatError) as error:
            assert _is_of(state, 0), "it was touched all the same"
            return 0, str(error)
        assert _is_of(state, restored.step)
        return restored.step, restored.decision


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(kind, damage) for kind in NEEDED for damage in DAMAGES if damage != "extended" or kind.startswith("shard")],
)
def test_r165_r166_r174_damage_to_what_is_needed(copy: Path, daemon: Daemon, kind: str, damage: str) -> None:
    (path,) = copy.glob(NEEDED[kind])
    also = DAMAGES[damage](path, copy)
    reason = asyncio.run(_verified(copy))
    step, told = _restored(copy, daemon)
    names = [found.relative_to(copy).as_posix() for found in (path, also) if found is not None]
    if (kind, damage) == ("manifest", "removed"):
        assert step == NEW  # it had all receipts, so the next start has committed it
        return
    assert any(name in reason for name in names)
    if (kind, damage) == ("manifest", "swapped"):
        assert step == 0  # so is the other one
    elif (kind, damage) not in HARMLESS:
        assert step == OLD
    if step != NEW:
        assert any(name in told for name in names)


HARMLESS = {("shard", "extended"), ("shard of another rank", "extended")}
"""What is behind the end of a shard is never read."""


@pytest.mark.parametrize("damage", ["removed", "flipped", "truncated", "a pickle"])
@pytest.mark.parametrize("kind", BESIDE)
def test_r166_r167_damage_to_what_lies_beside(copy: Path, daemon: Daemon, kind: str, damage: str) -> None:
    (path,) = copy.glob(BESIDE[kind])
    also = DAMAGES[damage](path, copy)
    reason = asyncio.run(_verified(copy))
    try:
        step, told = _restored(copy, daemon)
    except CkptdError as error:
        step, told = 0, str(error)
    names = [found.relative_to(copy).as_posix() for found in (path, also) if found is not None]
    if kind in ("mark", "pin"):
        assert (step, reason) == (NEW, "")
    else:
        if (kind, damage) == ("run", "flipped"):  # another run's id: who is wrong, it or the manifests, nobody can say
            names.append(f"manifests/{Version(NEW, 1)}.json")
        assert any(name in reason for name in names)
        assert step == NEW or any(name in told for name in names)


@pytest.mark.parametrize("place", ["../outside", "/etc/passwd", "checkpoints/../../outside"])
def test_r166_a_manifest_that_leads_out_of_the_run(copy: Path, daemon: Daemon, place: str) -> None:
    manifest = copy / NEEDED["manifest"]
    inside = json.loads(manifest.read_bytes())["receipts"][0]["key"]
    (copy.parent / "outside").write_bytes((copy / inside).read_bytes())
    manifest.write_bytes(manifest.read_bytes().replace(inside.encode(), place.encode()))
    assert NEEDED["manifest"] in asyncio.run(_verified(copy))
    step, told = _restored(copy, daemon)
    assert step == OLD
    assert NEEDED["manifest"] in told
