"""Family (a), tensors: every value is kept exactly, or refused by name before anything is written."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import MismatchError, StateError
from ckptd.format.dtypes import ITEM_BYTES
from ckptd_client.capture import State
from tests.client.roundtrip import Stored, bits, capture, restore, save


def tree_of(stored: Stored) -> str:
    return stored.tree.decode()


def test_r03_a_slice_is_stored_without_its_parent() -> None:
    big = torch.arange(1_000_000.0)
    stored = save({"x": big[:10]})
    assert stored.data_bytes == 40
    live = torch.zeros(10)
    restore(stored, {"x": live})
    assert live.tolist() == list(range(10))


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_r04_tied_weights_are_stored_once_and_stay_tied() -> None:
    model = Tied(tied=True)
    stored = save({"model": model})
    assert stored.data_bytes == 4 * 3 * 4
    assert stored.layout.aliases == {"model/head.weight": "model/emb.weight"}
    fresh = Tied(tied=True)
    report = restore(stored, {"model": fresh}).report
    assert not report.notices
    assert torch.equal(fresh.emb.weight, model.emb.weight)
    with torch.no_grad():
        fresh.emb.weight[0, 0] = 77
    assert fresh.head.weight[0, 0] == 77


def test_r04_an_untied_model_gets_two_equal_copies_and_a_notice() -> None:
    model, fresh = Tied(tied=True), Tied(tied=False)
    report = restore(save({"model": model}), {"model": fresh}).report
    assert torch.equal(fresh.emb.weight, model.emb.weight)
    assert torch.equal(fresh.head.weight, model.emb.weight)
    assert fresh.head.weight is not fresh.emb.weight
    assert [notice for notice in report.notices if "model/head.weight" in notice]


def test_r04_different_values_do_not_fit_into_a_tied_model() -> None:
    model, fresh = Tied(tied=False), Tied(tied=True)
    before = fresh.emb.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"model/head\.weight .*tied to model/emb\.weight"):
        restore(save({"model": model}), {"model": fresh})
    assert torch.equal(fresh.emb.weight, before)
    with torch.no_grad():
        model.head.weight.copy_(model.emb.weight)
    restore(save({"model": model}), {"model": fresh})
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_r04_ties_between_parts_are_found() -> None:
    model = nn.Linear(3, 3)
    stored = save({"model": model, "watched": {"w": model.weight}})
    assert stored.layout.aliases == {"watched/w": "model/weight"}


def test_r05_overlapping_tensors_are_stored_each_on_its_own() -> None:
    buffer, other = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    stored = save({"a": buffer[0:4], "b": buffer[2:6]})
    assert stored.data_bytes == 8 * 8
    restore(stored, {"a": other[0:4], "b": other[2:6]})
    assert other.tolist() == [0, 1, 2, 3, 4, 5]
    apart = {"a": torch.zeros(4, dtype=torch.int64), "b": torch.zeros(4, dtype=torch.int64)}
    restore(stored, apart)
    assert apart["a"].tolist() == [0, 1, 2, 3]
    assert apart["b"].tolist() == [2, 3, 4, 5]


def _strided() -> dict[str, torch.Tensor]:
    x = torch.arange(24.0).reshape(4, 6)
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    return {
        "transposed": x.t(),
        "every second": x[:, ::2],
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
        "channels last": image,
        "flipped": x.flip(0),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    }


def test_r06_tensors_of_any_stride_return_exactly() -> None:
    saved = _strided()
    fresh = {name: torch.zeros_like(value) for name, value in saved.items()}
    kept = dict(fresh)
    restore(save({"x": saved}), {"x": fresh})
    for name, value in saved.items():
        assert torch.equal(fresh[name], value), name
        assert fresh[name] is kept[name], name


def test_r06_values_are_taken_into_the_strides_of_the_live_tensor() -> None:
    saved = _strided()
    live = {name: value.clone().zero_() if name != "expanded" else value.clone() for name, value in saved.items()}
    restore(save({"x": {name: value.contiguous() for name, value in saved.items()}}), {"x": live})
    assert all(torch.equal(live[name], value) for name, value in saved.items())
    strides = {name: torch.zeros(9, 9).t()[:4, :6] for name in ("a",)}
    restore(save({"x": {"a": torch.arange(24.0).reshape(4, 6)}}), {"x": strides})
    assert strides["a"].tolist() == torch.arange(24.0).reshape(4, 6).tolist()


def test_r06_an_expanded_live_tensor_is_replaced_with_a_notice() -> None:
    live: dict[str, Any] = {"x": torch.zeros(1).expand(4)}
    report = restore(save({"s": {"x": torch.arange(4.0)}}), {"s": live}).report
    assert live["x"].tolist() == [0, 1, 2, 3]
    assert any("s/x" in notice for notice in report.notices)
    module = nn.Module()
    module.register_buffer("ids", torch.zeros(1).expand(4))
    source = nn.Module()
    source.register_buffer("ids", torch.arange(4.0))
    restore(save({"m": source}), {"m": module})
    assert module.ids.tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]


def _dtypes() -> list[torch.dtype]:
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", _dtypes(), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_r07_every_dtype_returns_bit_for_bit_or_is_refused_by_name(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        with pytest.raises(StateError, match=rf"part/x: .*{name}"):
            save({"part": {"x": torch.empty(4, dtype=dtype)}})
        return
    if dtype is torch.bool:
        value = torch.tensor([[True, False, True], [False, False, True]])
    else:  # every bit pattern counts, nan payloads included
        random = torch.Generator().manual_seed(7)
        raw = torch.randint(0, 256, (2, 3 * ITEM_BYTES[name]), dtype=torch.uint8, generator=random)
        value = raw.view(dtype)
    live = torch.zeros(value.numel() * ITEM_BYTES[name], dtype=torch.uint8).view(dtype).reshape(value.shape)
    stored = save({"part": {"x": value, "scalar": value[0, 0]}})
    state = {"part": {"x": live, "scalar": live[1, 1].clone()}}
    restore(stored, state)
    assert torch.equal(bits(live), bits(value))
    assert torch.equal(bits(state["part"]["scalar"]), bits(value[0, 0]))


def test_r07_another_dtype_in_the_live_state_is_an_error() -> None:
    with pytest.raises(MismatchError, match=r"x .*dtype float32 in the checkpoint, float16 here"):
        restore(save({"x": torch.zeros(3)}), {"x": torch.zeros(3, dtype=torch.float16)})


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse_coo", lambda: torch.eye(3).to_sparse()),
        ("sparse_csr", lambda: torch.eye(3).to_sparse_csr()),
        ("nested", lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors).*:UserWarning")
def test_r07_tensors_of_another_make_are_refused_by_name(kind: str, make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(StateError, match=f"part/x: a {kind} tensor"):
        save({"part": {"x": make()}})


def test_r12_a_plain_tensor_of_several_ranks_is_each_ranks_own() -> None:
    saved = [save({"pos": torch.tensor([rank]), "n": rank}, rank=rank, world=4) for rank in range(4)]
    assert all(entry.per_rank for stored in saved for entry in stored.layout.tensors)
    for rank, stored in enumerate(saved):
        state: dict[str, Any] = {"pos": torch.tensor([-1]), "n": -1}
        restore(stored, state, world=4)
        assert state["pos"].tolist() == [rank]
        assert state["n"] == rank
    assert not any(leaf.per_rank for leaf in capture({"pos": torch.zeros(1)}).leaves)


def test_r23_frozen_parameters_and_buffers_are_part_of_the_model() -> None:
    def make() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        return {"model": model, "optimizer": torch.optim.SGD(model[2].parameters(), lr=0.1)}

    state, fresh = make(), make()
    state["model"][1](torch.randn(4, 2))
    restore(save(state), fresh)
    for (name, a), b in zip(state["model"].state_dict().items(), fresh["model"].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not fresh["model"][0].weight.requires_grad


def test_r24_placeholders_are_refused_by_name_and_empty_parameters_noted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(StateError, match=r"model/1\.weight: a tensor on the meta device"):
        save({"model": model})
    with pytest.raises(StateError, match=r"model/weight: .*not initialized"):
        save({"model": nn.LazyLinear(3)})
    freed = nn.Linear(2, 2)
    freed.weight.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"model/weight: its memory has been freed"):
        save({"model": freed})
    placeholder = nn.Linear(2, 2)
    placeholder.weight.data = torch.empty(0)
    assert capture({"model": placeholder}).notices == ("model/weight: a parameter without elements",)


def test_r25_thousands_of_tensors_take_no_descriptors() -> None:
    state = {"x": {str(i): torch.full((1,), float(i)) for i in range(5000)}}
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    captured = capture(state)
    assert len(captured.leaves) == 5000
    assert len(os.listdir("/proc/self/fd")) == before


def test_r26_the_plan_of_a_capture_stands_until_the_structure_changes() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = State({"model": model, "optimizer": optimizer, "n": 1}, world=1, rng=True)
    first = state.capture()
    again = state.capture()
    assert again.leaves is first.leaves
    assert again.structure is first.structure
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    grown = state.capture()
    assert grown.structure is not first.structure
    assert len(grown.leaves) == 4 * len(first.leaves)
    optimizer.step()
    assert state.capture().leaves is grown.leaves


def test_r26_a_leaf_that_moved_is_found_and_only_it_is_new() -> None:
    """Memory that moved makes one new leaf. Another parameter in the same place has all looked at anew: what it is
    called and who owns it may have changed; the structure, and with it the plan, stays as long as it is the same."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    state = State({"model": model}, world=1, rng=False)
    first = state.capture()
    model[2].bias.data = torch.full((2,), 6.0)
    second = state.capture()
    assert second.structure is first.structure
    (moved,) = (b for a, b in zip(first.leaves, second.leaves, strict=True) if a is not b)
    assert (moved.name, float(moved.tensor.sum())) == ("model/2.bias", 12)
    model[1].weight = nn.Parameter(torch.full((2, 2), 5.0))  # as load_state_dict(assign=True) does
    third = state.capture()
    assert third.structure is second.structure
    assert {leaf.name: float(leaf.tensor.sum()) for leaf in third.leaves}["model/1.weight"] == 20
    model[3].weight = model[0].weight
    tied = state.capture()
    assert tied.structure is not third.structure
    assert tied.aliases == {"model/3.weight": "model/0.weight"}


def test_r27_a_checkpoint_knows_no_device() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stored = save({"model": model, "optimizer": optimizer}, rng=True)
    text = tree_of(stored) + json.dumps(stored.layout_bytes.decode())
    assert "cpu" not in text
    assert "cuda:" not in text


def test_r27_states_of_devices_that_are_not_here_are_skipped_and_reported() -> None:
    here = torch.cuda.device_count()
    stored = save({"n": 1}, rng=True)
    member = '["cuda",['
    assert member in tree_of(stored)
    state = '{"$":"bytes","v":"AAAAAAAAAAAAAAAAAAAAAA=="}'
    head, _, tail = tree_of(stored).partition(member)
    tail = tail[tail.index("]]") :]
    forged = head + member + ",".join([state] * (here + 2)) + tail
    report = restore(dataclasses.replace(stored, tree=forged.encode()), {"n": 0}, rng=True).report
    assert report.skipped == tuple((f"rng/cuda/~l{here + i}", "there is no such device here") for i in range(2))
