"""Family (e): a checkpoint goes into another layout whole, or not at all and with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import MismatchError
from ckptd_client import Checkpointer
from ckptd_client.restored import Restored
from tests.client.conftest import Daemon
from tests.ranks.conftest import RankError, Ranks

Open = Callable[..., Checkpointer]


def saved(open_ckpt: Open, url: str, state: dict[str, Any]) -> None:
    with open_ckpt(url, state) as ckpt:
        ckpt.save(1).wait(timeout=60)


def restored(open_ckpt: Open, url: str, state: dict[str, Any], **options: Any) -> Restored:
    with open_ckpt(url, state) as ckpt:
        return ckpt.restore(**options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """After one step, so that it has state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


# Padding


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("other", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3)), 4])
def test_r111_padding_is_not_stored_and_shifts_nothing(
    ranks: Ranks, daemon: Daemon, tmp_run: str, world: int, other: int
) -> None:
    """Tensors of 7 and 13 elements in flat shards that are padded to multiples of 4; every element is compared, of the
    optimizer's state too."""
    ranks.open(tmp_run, world, daemon.socket, odd="flat")
    ranks.each("restore")
    ranks.each("run", steps=2)
    ranks.each("save_as_it_is", step=2)
    before: dict[str, str] = {}
    for answer in ranks.each("values"):
        assert not before.keys() & answer["values"].keys() - {"group/flat"}
        before |= answer["values"]
    assert len([name for name in before if name.startswith("state/")]) == 3 * (7 + 13)
    ranks.each("close")
    for warm in (True, False):  # into an optimizer that has state, and into a fresh one
        ranks.open(tmp_run, other, daemon.socket, odd="flat", of={"seed": 9})
        if warm:
            ranks.each("run", steps=1)
        ranks.each("restore")
        after: dict[str, str] = {}
        for answer in ranks.each("values"):
            after |= answer["values"]
        assert after == before
        ranks.each("close")


# Another size


@pytest.mark.parametrize("shape", [(8, 4), (2, 4), (1, 4), (4,), (4, 4, 1), (16,)])
@pytest.mark.parametrize("strict", [True, False])
def test_r114_a_tensor_of_another_size_is_refused(
    open_ckpt: Open, tmp_run: str, shape: tuple[int, ...], strict: bool
) -> None:
    """Also one to which the saved one could be broadcast, or that has as many elements."""
    saved(open_ckpt, tmp_run, {"w": torch.full((4, 4), 3.0), "b": torch.full((2,), 5.0)})
    live = {"w": torch.zeros(shape), "b": torch.zeros(2)}
    reason = f"shape (4, 4) in the checkpoint, {shape} here"
    if strict:
        with pytest.raises(MismatchError, match=re.escape(f"w ({reason})")):
            restored(open_ckpt, tmp_run, live)
        assert not live["b"].any()
    else:
        report = restored(open_ckpt, tmp_run, live, strict=False).report
        assert dict(report.skipped) == {"w": reason}
        assert torch.equal(live["b"], torch.full((2,), 5.0))
    assert torch.equal(live["w"], torch.zeros(shape))


def test_r114_what_each_rank_holds_may_be_as_large_and_the_whole_is_not(
    ranks: Ranks, daemon: Daemon, tmp_path: Path, tmp_run: str
) -> None:
    """Two ranks saved two rows each; each of three ranks has two rows of six."""

    def opened(world: int, rows: int, seed: int) -> None:
        ranks.each("ungroup")
        ranks.group(world, tmp_path)
        ranks.open(tmp_run, world, daemon.socket, layout="rows", of={"rows": rows, "row_bytes": 64, "seed": seed})

    opened(2, 4, 1)
    ranks.each("restore")
    ranks.each("save_as_it_is", step=1)
    opened(3, 6, 2)
    before = ranks.each("values")
    with pytest.raises(RankError, match=r"rows \(shape \(4, 16\) in the checkpoint, \(6, 16\) here\)"):
        ranks.each("restore")
    assert ranks.each("values") == before


# Another dtype


@pytest.mark.parametrize("module", [False, True])
def test_r115_another_dtype_is_refused_unless_a_cast_is_asked_for(open_ckpt: Open, tmp_run: str, module: bool) -> None:
    def state(dtype: torch.dtype) -> dict[str, Any]:
        model = nn.Linear(3, 5).to(dtype)
        return {"model": model if module else dict(model.named_parameters())}

    def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = state["model"]
        return dict(model.named_parameters()) if isinstance(model, nn.Module) else model

    full = state(torch.float32)
    saved(open_ckpt, tmp_run, full)
    half = state(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in tensors(half).items()}
    with pytest.raises(MismatchError, match=r"model/weight \(dtype float32 in the checkpoint, bfloat16 here\)"):
        restored(open_ckpt, tmp_run, half)
    with pytest.raises(MismatchError, match=r"does not fit: model/bias \(dtype"):
        restored(open_ckpt, tmp_run, half, cast=["*/weight", "model/weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(half).items())
    for cast in (True, ["model/*"]):
        half = state(torch.bfloat16)
        report = restored(open_ckpt, tmp_run, half, cast=cast).report
        assert "model/weight: cast from float32 to bfloat16" in report.notices
        for name, tensor in tensors(half).items():
            assert tensor.dtype is torch.bfloat16
            assert torch.equal(tensor, tensors(full)[name].to(torch.bfloat16))


def test_r115_what_is_wider_here_is_no_better(open_ckpt: Open, tmp_run: str) -> None:
    """Half a model saved in half precision, and an integer for a float."""
    saved(open_ckpt, tmp_run, {"w": torch.ones(3, dtype=torch.bfloat16), "n": torch.ones(3, dtype=torch.int64)})
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(MismatchError, match="dtype bfloat16 in the checkpoint"):
            restored(open_ckpt, tmp_run, {"w": torch.zeros(3, dtype=dtype), "n": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(MismatchError, match=r"n \(dtype int64 in the checkpoint, float32 here\)"):
        restored(open_ckpt, tmp_run, {"w": torch.zeros(3, dtype=torch.bfloat16), "n": torch.zeros(3)})


# Names


def layers(count: int) -> dict[str, Any]:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])
    return {"model": model, "optimizer": adam(model)}


@pytest.mark.parametrize(("there", "here"), [(2, 3), (3, 2)])
def test_r116_names_on_one_side_only_are_errors_and_are_reported(
    open_ckpt: Open, tmp_run: str, there: int, here: int
) -> None:
    """A layer more and a layer less, in the model and the optimizer alike."""
    saved(open_ckpt, tmp_run, full := layers(there))
    live = layers(here)
    before = [parameter.clone() for parameter in live["model"].parameters()]
    kind = "missing from" if here > there else "unexpected in"
    names = ["model/2.weight", "model/2.bias", "optimizer/state/2.weight", "optimizer/state/2.bias"]
    with pytest.raises(MismatchError, match=f"{kind} the checkpoint: {', '.join(names)}"):
        restored(open_ckpt, tmp_run, live)
    assert all(map(torch.equal, before, live["model"].parameters()))
    report = restored(open_ckpt, tmp_run, live, strict=False).report
    assert list(report.missing if here > there else report.unexpected) == names
    assert not (report.unexpected if here > there else report.missing)
    for one, other in zip(full["model"].parameters(), live["model"].parameters(), strict=False):
        assert torch.equal(one, other)


def test_r116_whole_parts_on_one_side_only(open_ckpt: Open, tmp_run: str) -> None:
    saved(open_ckpt, tmp_run, {"model": nn.Linear(2, 2), "extra": 1})
    with pytest.raises(MismatchError, match="missing from the checkpoint: more; unexpected in the checkpoint: extra"):
        restored(open_ckpt, tmp_run, {"model": nn.Linear(2, 2), "more": 2})


# Lists


@pytest.mark.parametrize("lengths", [[1, 5], [0, 2]])
def test_r117_lists_whose_length_differs_by_rank_are_each_ranks_own(
    ranks: Ranks, daemon: Daemon, tmp_run: str, lengths: Sequence[int]
) -> None:
    of = {"lengths": lengths}
    ranks.open(tmp_run, 2, daemon.socket, odd="lists", of=of)
    ranks.each("restore")
    ranks.each("run", steps=1)
    before = ranks.each("values")
    ranks.each("save_as_it_is", step=1)
    ranks.each("close")
    # The fresh process has another number of them.
    ranks.open(tmp_run, 2, daemon.socket, odd="lists", of={"lengths": [3, 3], "seed": 9})
    ranks.each("restore")
    after = ranks.each("values")
    assert [answer["values"] for answer in after] == [answer["values"] for answer in before]
    ranks.each("close")
    ranks.open(tmp_run, 1, daemon.socket, odd="lists", of={"lengths": [3], "seed": 9})
    with pytest.raises(RankError, match=r"queue \(each of 2 ranks had its own value, and there are 1 now\)"):
        ranks.each("restore")
    ranks.each("close")
    ranks.open(tmp_run, 1, daemon.socket, odd="lists", of={"lengths": [3], "seed": 9})
    own = ranks[0].do("values")["values"]["queue"]
    ranks.each("restore", exclude=["queue"])
    after = ranks[0].do("values")["values"]
    assert after.pop("queue") == own
    assert after == {name: value for name, value in before[0]["values"].items() if name != "queue"}
