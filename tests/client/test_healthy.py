"""Values that are not finite are found in the copy, marked, and passed over by a restore and by retention."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.checkpoint.keep import Keep
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.standing import Standing
from ckptd.errors import ConfigError
from ckptd.format.keys import Version
from ckptd.storage import open_backend
from ckptd_client import Checkpointer
from ckptd_client.capture import Leaf
from ckptd_client.capture.selection import Selection
from ckptd_client.staging import finite
from ckptd_client.staging.finite import looked_at, not_finite
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training

Open = Callable[..., Checkpointer]

FLOATS = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def leaf(name: str, tensor: torch.Tensor, *, fenced: bool = True, resident: bool = False) -> Leaf:
    return Leaf(name, tensor, tuple(tensor.shape), None, None, per_rank=True, fenced=fenced, resident=resident)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "CHUNK_ELEMENTS", 16)
    wrong = torch.ones(7, 9)
    wrong[6, 3] = bad
    leaves = [leaf("good", torch.ones(7, 9).to(dtype)), leaf("bad", wrong.to(dtype)), leaf("none", torch.ones(0))]
    # Some of them have no infinity, and store the largest number for it.
    stored = leaves[1].tensor.to(torch.complex128 if dtype.is_complex else torch.float64)
    expected = () if torch.isfinite(stored).all() else ("bad",)
    assert not_finite(leaves, [one.tensor for one in leaves], looked_at(leaves, True)) == expected
    assert expected or math.isinf(bad)


def test_a_sum_that_overflows_is_no_infinity() -> None:
    large = leaf("large", torch.full((4,), torch.finfo(torch.float32).max))
    assert not_finite([large], [large.tensor], [0]) == ()


def test_what_is_looked_at() -> None:
    leaves = [
        leaf("model/w", torch.ones(2)),
        leaf("model/mask", torch.full((2,), -math.inf), fenced=False),
        leaf("model/steps", torch.ones(2, dtype=torch.int64)),
        leaf("model/other", torch.ones(2), resident=True),
    ]
    assert looked_at(leaves, True) == [0]
    assert looked_at(leaves[1:], True) == [0]  # where there is no optimizer, all
    assert looked_at(leaves, False) == []
    assert looked_at(leaves, Selection(["model/m*"])) == [1]


def standings(url: str) -> dict[Version, Standing]:
    async def read() -> dict[Version, Standing]:
        return await (await Run.open(open_backend(url))).standings()

    return asyncio.run(read())


def committed(url: str) -> list[int]:
    async def read() -> list[int]:
        return [version.step for version in await (await Run.open(open_backend(url))).committed()]

    return asyncio.run(read())


@pytest.mark.parametrize("overlap", [True, False])
def test_r72_healthy_checkpoints_outlive_all_that_are_not(open_ckpt: Open, tmp_run: str, overlap: bool) -> None:
    training = Training()
    options: dict[str, Any] = {"keep": Keep(last=2), "check_finite": True, "overlap": overlap, "launch": "one"}
    options["incremental"] = False  # what is nan stays nan: the last two would need bytes of those before
    ckpt = open_ckpt(tmp_run, training.state, every_steps=1, **options)
    healthy: list[torch.Tensor] = []
    for step in range(1, 9):
        training.step()
        if step == 3:
            with torch.no_grad():
                training.model[1].bias[3] = math.nan  # type: ignore[index]
        save = ckpt.step(step)
        assert save is not None
        ckpt.flush(timeout=60)
        assert ("model/1.bias" in save.not_finite) == (step >= 3)
        healthy = training.parameters() if step == 2 else healthy
    ckpt.close()
    wait_until(lambda: committed(tmp_run) == [1, 2, 7, 8], "retention", deadline_seconds=20)
    # Marks go last.
    wait_until(lambda: {version.step for version in standings(tmp_run)} == {7, 8}, "its end", deadline_seconds=20)
    assert all(each.unhealthy for each in standings(tmp_run).values())

    fresh = Training(seed=1)
    again = open_ckpt(tmp_run, fresh.state, launch="two")
    restored = again.restore()  # the daemon still has 8 in memory
    assert restored.step == 2
    assert "step 8-g1 was passed over: it is marked unhealthy" in restored.decision
    assert "step 7-g1 was passed over: it is marked unhealthy" in restored.report.notices
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), healthy, strict=True))


def test_an_unhealthy_one_is_restored_where_there_is_no_other(open_ckpt: Open, tmp_run: str) -> None:
    weights = {"w": torch.tensor([1.0, math.nan])}
    with open_ckpt(tmp_run, weights, check_finite=["w"], launch="one") as ckpt:
        ckpt.save(1)
    weights["w"].zero_()
    with open_ckpt(tmp_run, weights, launch="two") as ckpt:
        assert ckpt.restore().step == 1
    assert math.isnan(weights["w"][1])


def test_one_that_was_asked_for_is_restored_and_said_to_be_unhealthy(open_ckpt: Open, tmp_run: str) -> None:
    weights = {"w": torch.ones(2)}
    with open_ckpt(tmp_run, weights, check_finite=True, launch="one") as ckpt:
        ckpt.save(1)
        weights["w"][0] = math.inf
        ckpt.save(2)
    with open_ckpt(tmp_run, weights, launch="two") as ckpt:
        restored = ckpt.restore(2)
    assert (restored.step, restored.report.notices[0]) == (2, "step 2-g1 is marked unhealthy")


@pytest.mark.parametrize("wrong", [{"check_finite": "w"}, {"verify_load": "load"}, {"verify_load_every": 0}], ids=str)
def test_what_makes_no_sense_is_refused(open_ckpt: Open, tmp_run: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        open_ckpt(tmp_run, {"w": torch.ones(2)}, **wrong)


def test_the_daemon_loads_what_was_committed_by_the_users_function(
    own_daemon: Callable[..., Daemon],
    open_ckpt: Open,
    tmp_run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = own_daemon("--verify-bandwidth", "1000", "--verify-delay", "0")
    (tmp_path / "my_loader.py").write_text(
        "import torch\n"
        "from ckptd_client import open_checkpoint\n"
        "def load(url, checkpoint, options):\n"
        "    with open_checkpoint(url, checkpoint, storage_options=options) as saved:\n"
        "        assert saved['w'].tensor().tolist() == [1.0, 1.0], 'not what it was trained to'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    weights = {"w": torch.zeros(2)}
    options: dict[str, Any] = {"socket": daemon.socket, "verify_load": "my_loader:load", "verify_load_every": 1}
    with open_ckpt(tmp_run, weights, **options) as ckpt:
        ckpt.save(1)
        wait_until(lambda: bool(standings(tmp_run)), "the verdict", deadline_seconds=60)
    assert standings(tmp_run) == {Version(1, 1): Standing(suspect=True)}
