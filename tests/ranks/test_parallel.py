"""Real process groups, every kind of parallelism: what the ranks save together is the whole state, once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.format.cover import boxes_of, check_cover
from ckptd.format.records import IndexPiece, Layout, Receipt, Snapshot, TensorEntry, decode, decode_layout
from ckptd_client.dtypes import torch_dtype
from tests.client.conftest import Daemon
from tests.ranks.conftest import Ranks


class Saved:
    """One step as it lies in storage, put together from the shards of all ranks."""

    def __init__(self, url: str, step: int) -> None:
        root = Path(url.removeprefix("file://"))
        self.layouts: list[Layout] = []
        self.snapshots: list[Snapshot] = []
        self._shards: list[bytes] = []
        for path in sorted(root.glob(f"checkpoints/{step:012d}-g*/rank-*.json")):
            receipt = decode(path.read_bytes(), Receipt)
            snapshot = decode(receipt.snapshot, Snapshot)
            self.snapshots.append(snapshot)
            self.layouts.append(decode_layout(snapshot.layout))
            self._shards.append((root / receipt.shard.key).read_bytes())

    @property
    def shard_bytes(self) -> list[int]:
        """Of data, by rank."""
        return [layout.shard_bytes - layout.header_bytes for layout in self.layouts]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that is one value for the world, each of its elements stored once; and aliases."""
        seen: dict[str, TensorEntry] = {}
        pieces: dict[str, list[IndexPiece]] = {}
        for rank, layout in enumerate(self.layouts):
            for entry in layout.tensors:
                seen[entry.name] = entry
                of_it = pieces.setdefault(entry.name, [])
                if not entry.per_rank or not of_it:  # of what each calls its own, the first one's
                    of_it += [
                        IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank, span=p.span) for p in entry.pieces
                    ]
        found = {name: self._tensor(seen[name], of_it) for name, of_it in pieces.items()}
        for layout in self.layouts:
            found |= {alias: found[name] for alias, name in layout.aliases.items()}
        return found

    def _tensor(self, entry: TensorEntry, pieces: list[IndexPiece]) -> torch.Tensor:
        check_cover(entry.name, entry.shape, pieces)
        dtype = torch_dtype(entry.dtype)
        whole = torch.empty(entry.shape, dtype=dtype)
        for piece in pieces:
            data = bytearray(self._shards[piece.rank][piece.at : piece.at + piece.bytes])
            values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            at = 0
            for box in boxes_of(piece, entry.shape):
                place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
                count = whole[place].numel()
                whole[place] = values[at : at + count].reshape(box.lengths)
                at += count
        return whole


def save_and_gather(ranks: Ranks, daemon: Daemon, url: str, folder: Path, world: int, **options: Any) -> Any:
    """Train, save one rank after the other, and gather the same state by torch's own means."""
    ranks.group(world, folder)
    ranks.open(url, world, daemon.socket, **options)
    for _ in range(2):
        ranks.each("run")
    ranks.each("restore")
    # If a save asked another rank for anything, the first one would wait without end.
    assert [ranks[rank].do("save_alone", step=2)["collectives"] for rank in range(world)] == [0] * world
    ranks.each("wait", step=2)
    ranks.each("whole", path=str(folder / "whole.pt"))
    return Saved(url, 2), torch.load(folder / "whole.pt")


def check_same(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    """The same names, and bit for bit the same values."""
    assert set(found) == set(whole)
    for name, value in whole.items():
        assert torch.equal(found[name], value.cpu()), name


KINDS = [
    "ddp",
    "checkpointed",
    "fsdp2",
    "hsdp",
    "tp",
    "fsdp_tp",
    "fsdp1",
    "fsdp1_flat",
    "fsdp1_hybrid",
    "fsdp1_unsharded",
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_ranks_save_is_the_whole_state(
    ranks: Ranks, daemon: Daemon, tmp_run: str, tmp_path: Path, kind: str
) -> None:
    saved, whole = save_and_gather(ranks, daemon, tmp_run, tmp_path, 4, kind=kind, width=10, layers=3)
    found = saved.tensors()
    if kind.startswith("fsdp1"):  # running statistics are each rank's own there
        found = {name: value for name, value in found.items() if ".norm.r" not in name}
        whole = {name: value for name, value in whole.items() if ".norm.r" not in name}
    check_same(found, whole)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "hsdp"])
def test_the_bytes_are_spread_over_the_ranks(
    ranks: Ranks, daemon: Daemon, tmp_run: str, tmp_path: Path, kind: str
) -> None:
    """One copy of the state, and no rank writes much more than another."""
    saved, whole = save_and_gather(ranks, daemon, tmp_run, tmp_path, 4, kind=kind, width=200, layers=8)
    one_copy = sum(value.nbytes for value in whole.values())
    assert one_copy <= sum(saved.shard_bytes) <= 1.02 * one_copy
    assert max(saved.shard_bytes) <= 1.2 * one_copy / 4


def test_a_zero_redundancy_optimizer_is_saved_where_its_state_is(
    ranks: Ranks, daemon: Daemon, tmp_run: str, tmp_path: Path
) -> None:
    options = {"kind": "zero", "width": 10, "layers": 3, "replicated": True}
    saved, whole = save_and_gather(ranks, daemon, tmp_run, tmp_path, 2, **options)
    found = saved.tensors()
    check_same({name: value for name, value in found.items() if name.startswith("model/")}, whole)
    moments = [{e.name for e in layout.tensors if e.name.endswith("exp_avg") and e.pieces} for layout in saved.layouts]
    assert moments[0]
    assert moments[1]
    assert not moments[0] & moments[1]
    assert len(moments[0] | moments[1]) == 3 * 6
    assert sum(saved.shard_bytes) < 1.05 * 3 * sum(value.nbytes for value in whole.values())


def test_names_do_not_depend_on_what_wraps_a_model(ranks: Ranks, daemon: Daemon, tmp_path: Path, tmp_run: str) -> None:
    """The names are those of the plain model, and torch's own for the wrapped one."""
    ranks.group(2, tmp_path)
    names: dict[str, set[str]] = {}
    for kind in ("plain", "ddp", "checkpointed", "fsdp2", "fsdp1", "fsdp1_flat"):
        url = f"{tmp_run}-{kind}"
        ranks.open(url, 2, daemon.socket, kind=kind, replicated=True)
        ranks.each("run")
        ranks.each("restore")
        ranks.each("save_alone", step=1)
        ranks.each("wait", step=1)
        ranks.each("whole", path=str(tmp_path / "whole.pt"))
        names[kind] = set(Saved(url, 1).tensors())
        assert names[kind] == set(torch.load(tmp_path / "whole.pt")), kind
        ranks.each("close")
    for kind, found in names.items():
        # Whether the optimizer has the parameter that is frozen elsewhere depends on how FSDP was asked.
        others = found ^ names["plain"]
        if kind == "checkpointed":  # a model without normalization
            others = {name for name in others if ".norm." not in name}
        assert {name for name in others if "/state/" not in name or ".scale/" not in name} == set(), kind


def test_shares_of_tensors_earn_their_overlap(ranks: Ranks, daemon: Daemon, tmp_run: str, tmp_path: Path) -> None:
    """Rows of a tensor are copied during the next forward and backward, and are what they were at the save."""
    ranks.group(4, tmp_path)
    ranks.open(tmp_run, 4, daemon.socket, kind="ddp", width=640, layers=1, every_steps=1, check="full")
    ranks.each("restore")
    ranks.train(1, 4)
    overlapped = [ranks[rank].do("wait", step=4)["overlapped_bytes"] for rank in range(4)]
    ranks.each("whole", path=str(tmp_path / "whole.pt"))
    saved = Saved(tmp_run, 4)
    check_same(saved.tensors(), torch.load(tmp_path / "whole.pt"))
    cut = [entry for entry in saved.layouts[0].tensors if entry.pieces and entry.pieces[0].box is not None]
    assert cut
    assert min(overlapped) > 0.9 * min(saved.shard_bytes)


def test_with_a_check_each_rank_has_all_of_its_replicas(
    ranks: Ranks, daemon: Daemon, tmp_run: str, tmp_path: Path
) -> None:
    ranks.group(2, tmp_path)
    ranks.open(tmp_run, 2, daemon.socket, kind="ddp", width=200, layers=2, check_replicas=True)
    ranks.each("run")
    ranks.each("restore")
    ranks.each("save_alone", step=1)
    ranks.each("wait", step=1)
    saved = Saved(tmp_run, 1)
    led = (".running_mean", ".running_var", ".num_batches_tracked")
    for mine, others in (saved.layouts, saved.layouts[::-1]):
        owned = {(e.name, str(p.box)) for e in others.tensors for p in e.pieces if not e.name.endswith(led)}
        assert owned == {(e.name, str(p.box)) for e in mine.tensors for p in e.resident}
    assert all(snapshot.check_replicas for snapshot in saved.snapshots)


def test_replicas_on_two_nodes_are_in_the_memory_of_each(
    ranks: Ranks, own_daemon: Callable[..., Daemon], tmp_run: str, tmp_path: Path
) -> None:
    near, far = own_daemon(), own_daemon()
    ranks.group(4, tmp_path)
    ranks.open(tmp_run, 4, [near.socket, near.socket, far.socket, far.socket], kind="ddp", width=200, layers=4)
    ranks.each("run")
    ranks.each("restore")
    ranks.each("save_alone", step=1)
    ranks.each("wait", step=1)
    layouts = Saved(tmp_run, 1).layouts
    for node in (layouts[:2], layouts[2:]):
        pieces: dict[str, list[IndexPiece]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, layout in enumerate(node):
            assert layout.resident_bytes > 0
            for entry in layout.tensors:
                shapes[entry.name] = entry.shape
                pieces.setdefault(entry.name, [])
                if "norm." not in entry.name or "optimizer" in entry.name:  # running statistics are rank 0's
                    pieces[entry.name] += [
                        IndexPiece(at=p.at, box=p.box, bytes=p.bytes, rank=rank, span=p.span)
                        for p in (*entry.pieces, *entry.resident)
                    ]
        for name, of_it in pieces.items():
            if of_it:
                check_cover(name, shapes[name], of_it)
    resident = [layout.resident_bytes for layout in layouts]
    assert max(resident) <= 1.2 * sum(resident) / 4
