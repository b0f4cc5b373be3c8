"""Modules: names that no wrapper changes, everything that a state dict has, and modules with a way of their own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckptd.errors import MismatchError, StateError
from ckptd_client.capture import State
from tests.client.roundtrip import Stored, assert_fixed_point, assert_same, capture, restore, save


def names(stored: Stored) -> set[str]:
    return {entry.name for entry in stored.layout.tensors}


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2))


def _checkpointed() -> nn.Module:
    model = plain()
    model[1] = checkpoint_wrapper(model[1])
    return model


def _compiled() -> nn.Module:
    model = plain()
    model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _parallel() -> nn.Module:
    return nn.DataParallel(_compiled())


@pytest.mark.parametrize("wrap", [_checkpointed, _compiled, _parallel])
def test_names_do_not_depend_on_wrappers(wrap: Any) -> None:
    wrapped, bare = wrap(), plain()
    stored = save({"model": wrapped, "optimizer": torch.optim.SGD(wrapped.parameters(), lr=1, momentum=0.9)})
    assert names(stored) == {f"model/{name}" for name in plain().state_dict()}
    restore(stored, {"model": bare, "optimizer": torch.optim.SGD(bare.parameters(), lr=1)})
    again = wrap()
    restore(save({"model": bare}), {"model": again})
    assert_same(save({"model": again}), save({"model": wrapped}))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_names_do_not_depend_on_ddp() -> None:
    wrapped, bare = nn.parallel.DistributedDataParallel(_compiled()), plain()
    restore(save({"model": wrapped}), {"model": bare})
    assert names(save({"model": wrapped})) == names(save({"model": bare}))
    assert torch.equal(bare[0].weight, next(iter(wrapped.parameters())))


def test_a_users_own_child_called_module_keeps_its_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert names(save({"m": Own()})) == {"m/module.weight", "m/module.bias"}


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("nothing", None)


def test_persistent_buffers_are_kept_and_no_others() -> None:
    assert names(save({"m": Buffers()})) == {"m/kept"}


def test_modules_and_buffers_that_appear_are_seen() -> None:
    model = Buffers()
    state = State({"m": model}, world=1, rng=False)
    assert len(state.capture().leaves) == 1
    model.register_buffer("later", torch.ones(1))
    model.child = nn.Linear(1, 1)
    assert [leaf.name for leaf in state.capture().leaves] == ["m/kept", "m/later", "m/child.weight", "m/child.bias"]
    model.none = torch.ones(3)
    del model.child
    assert [leaf.name for leaf in state.capture().leaves] == ["m/kept", "m/none", "m/later"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: dict[str, Any] = {"n": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_extra_state_is_kept() -> None:
    model, fresh = nn.Sequential(Counting(), Counting()), nn.Sequential(Counting(), Counting())
    model[1].seen = {"n": 5, "t": torch.ones(2)}
    assert_fixed_point({"m": model}, {"m": fresh})
    assert fresh[0].seen == {"n": 0}
    assert torch.equal(fresh[1].seen["t"], torch.ones(2))
    assert fresh[1].seen["t"] is not model[1].seen["t"]


class Renamed(nn.Linear):
    """Makes and takes its state dict under a name of its own, packed."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = torch.cat([self.weight.detach().reshape(-1), self.bias.detach()])
        destination[prefix + "version"] = 3

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        packed = state_dict[prefix + "packed"]
        self.weight.data.copy_(packed[: self.weight.numel()].view_as(self.weight))
        self.bias.data.copy_(packed[self.weight.numel() :])


def test_a_module_with_a_way_of_its_own_is_asked_for_it() -> None:
    model, fresh = nn.Sequential(Renamed(2, 2), nn.Linear(2, 2)), nn.Sequential(Renamed(2, 2), nn.Linear(2, 2))
    stored = assert_fixed_point({"m": model}, {"m": fresh})
    assert names(stored) == {"m/0.packed", "m/1.weight", "m/1.bias"}
    assert torch.equal(fresh[0].weight, model[0].weight)
    wider = nn.Sequential(Renamed(3, 2), nn.Linear(2, 2))
    with pytest.raises(MismatchError, match=r"m/0\.packed \(shape \(6,\) in the checkpoint, \(8,\) here"):
        restore(stored, {"m": wider})


def test_hooks_of_the_users_own_are_heeded() -> None:
    model = nn.Linear(2, 2)
    stored_before = save({"m": model})
    state = State({"m": model}, world=1, rng=False)
    state.capture()

    def add(module: nn.Module, states: dict[str, Any], prefix: str, metadata: Any) -> None:
        states[prefix + "added"] = torch.ones(1)

    def remove(module: nn.Module, states: dict[str, Any], *args: Any) -> None:
        states.pop("added")

    model.register_state_dict_post_hook(add)
    model.register_load_state_dict_pre_hook(remove)
    assert "m/added" in {leaf.name for leaf in state.capture().leaves}
    restore(save({"m": model}), {"m": model})
    assert stored_before.tree != save({"m": model}).tree


def test_missing_unexpected_and_misshapen_tensors_are_all_named_at_once() -> None:
    saved, live = nn.ModuleDict(), nn.ModuleDict()
    saved.update({"a": nn.Linear(2, 2), "b": nn.Linear(1, 1)})
    live.update({"a": nn.Linear(3, 2), "c": nn.Linear(1, 1)})
    before = copy.deepcopy(live)
    with pytest.raises(MismatchError) as caught:
        restore(save({"m": saved}), {"m": live})
    for text in (
        "missing from the checkpoint: m/c.weight, m/c.bias",
        "unexpected in the checkpoint: m/b.weight, m/b.bias",
        "m/a.weight (shape (2, 2) in the checkpoint, (2, 3) here)",
    ):
        assert text in str(caught.value)
    assert all(map(torch.equal, live.parameters(), before.parameters()))
    report = restore(save({"m": saved}), {"m": live}, strict=False).report
    assert report.loaded == ("m/a.bias",)
    assert report.missing == ("m/c.weight", "m/c.bias")
    assert report.unexpected == ("m/b.weight", "m/b.bias")
    assert [name for name, _ in report.skipped] == ["m/a.weight"]
    assert torch.equal(live["a"].bias, saved["a"].bias)


def test_only_what_an_optimizer_owns_is_fenced() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.Adam(model[0].parameters())
    model[0](torch.ones(2, 1)).sum().backward()
    optimizer.step()
    leaves = capture({"m": model, "o": optimizer, "x": torch.ones(1), "same": model[0].weight}).leaves
    fenced = {leaf.name for leaf in leaves if leaf.fenced}
    assert fenced == {leaf.name for leaf in leaves if leaf.name.startswith(("m/0.", "o/"))}
    assert len(fenced) == 8


def test_names_that_collide_without_wrappers_are_refused() -> None:
    inner = nn.Linear(1, 1)
    outer = nn.Module()
    outer.weight = nn.Parameter(torch.zeros(1))
    outer._orig_mod = inner
    with pytest.raises(StateError, match="two values are called weight"):
        save({"m": outer})
