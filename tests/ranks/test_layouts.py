"""From any layout to any other, with real ranks: what was saved by one comes back in all, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckptd.format.records import Receipt, Snapshot, decode, decode_layout
from ckptd.limits import MIB
from devtools.seaweedfs import S3Endpoint
from tests.client.conftest import Daemon
from tests.ranks.conftest import Rank, RankError, Ranks

WORLDS = {"single": (1,), "ddp": (2, 3, 4), "fsdp2": (2, 3, 4), "tp": (2, 3, 4), "hsdp": (4,), "mesh2d": (4,)}
SPREADS = [(layout, world) for layout, worlds in WORLDS.items() for world in worlds]
STEPS = 3


class Before(NamedTuple):
    """A run that was saved, and what it was."""

    url: str
    values: dict[str, str]
    generators: list[dict[str, str]]


def begin(ranks: Ranks, folder: Path, socket: Path, url: str, spread: tuple[str, int], **options: Any) -> None:
    """Ranks in a process group of their own, with a training and a checkpointer."""
    layout, world = spread
    ranks.group(world, folder)
    ranks.open(url, world, socket, layout=layout, **options)


def end(ranks: Ranks) -> None:
    ranks.each("ungroup")


def values_of(ranks: Ranks) -> tuple[dict[str, str], list[dict[str, str]]]:
    """All values, which every rank must gather alike, and each rank's generators."""
    answers = ranks.each("values")
    for answer in answers[1:]:
        assert answer["values"] == answers[0]["values"]
    return answers[0]["values"], [answer["generators"] for answer in answers]


def saved(ranks: Ranks, folder: Path, socket: Path, url: str, spread: tuple[str, int], **options: Any) -> Before:
    """A few steps, and a save of them."""
    begin(ranks, folder, socket, url, spread, **options)
    ranks.run_and_save(STEPS)
    before = Before(url, *values_of(ranks))
    end(ranks)
    return before


def check_restored(ranks: Ranks, before: Before, source: str, saved_world: int) -> None:
    """Restore on all ranks, and compare."""
    answers = ranks.each("restore")
    assert {(answer["step"], answer["source"]) for answer in answers} == {(STEPS, source)}
    values, generators = values_of(ranks)
    assert {name for name in values if values[name] != before.values.get(name)} == set()
    assert set(values) == set(before.values)
    if ranks.world == saved_world:
        assert generators == before.generators


@pytest.fixture(scope="module")
def elsewhere(private_folders: Path) -> Iterator[Daemon]:
    """A daemon that no run was saved by, as on a machine that takes part for the first time."""
    found = Daemon(private_folders / "elsewhere")
    found.start()
    yield found
    found.kill()


@pytest.fixture(scope="module")
def runs(
    workers: list[Rank], daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Before]:
    """A run of each layout, saved; its snapshots stay with the daemon."""
    ranks = Ranks(workers)
    root = tmp_path_factory.mktemp("layouts")
    return {
        spread: saved(ranks, root, daemon.socket, f"file://{root}/{spread[0]}-{spread[1]}", spread)
        for spread in SPREADS
    }


@pytest.mark.parametrize("spread", SPREADS, ids=lambda spread: f"{spread[0]}{spread[1]}")
def test_any_layout_is_restored_into_this_one(
    ranks: Ranks, runs: dict[tuple[str, int], Before], elsewhere: Daemon, tmp_path: Path, spread: tuple[str, int]
) -> None:
    """From storage, by a daemon that has never heard of the run."""
    socket = elsewhere.socket
    for number, (other, before) in enumerate(runs.items()):
        begin(ranks, tmp_path, socket, before.url, spread, of={"seed": 9, "lr": 0.9, "warm": bool(number % 2)})
        check_restored(ranks, before, "storage", other[1])
        end(ranks)


FURTHER = (1, 4, 7)
REST = tuple(further for further in range(len(SPREADS)) if further not in FURTHER)


@pytest.mark.parametrize("further", [FURTHER, pytest.param(REST, marks=pytest.mark.long)], ids=["some", "rest"])
@pytest.mark.parametrize("number", range(len(SPREADS)), ids=lambda number: "{}{}".format(*SPREADS[number]))
def test_any_layout_is_restored_from_memory(
    others: Ranks,
    runs: dict[tuple[str, int], Before],
    daemon: Daemon,
    tmp_path: Path,
    number: int,
    further: tuple[int, ...],
) -> None:
    """By ranks in other processes, which only read what those that saved have left with the daemon. Each layout into
    three others, and in the long run into all, itself too."""
    saver = SPREADS[number]
    before = runs[saver]
    for other in further:
        spread = SPREADS[(number + other) % len(SPREADS)]
        begin(others, tmp_path, daemon.socket, before.url, spread, of={"seed": 9, "lr": 0.9, "warm": bool(other % 2)})
        check_restored(others, before, "memory", saver[1])
        end(others)


@pytest.mark.parametrize("spread", SPREADS, ids=lambda spread: f"{spread[0]}{spread[1]}")
def test_training_goes_on_bit_for_bit(
    ranks: Ranks, daemon: Daemon, elsewhere: Daemon, tmp_path: Path, tmp_run: str, spread: tuple[str, int]
) -> None:
    begin(ranks, tmp_path, daemon.socket, tmp_run, spread)
    ranks.run_and_save(STEPS)
    losses = ranks.each("run", steps=STEPS)
    after = values_of(ranks)
    end(ranks)
    for source, socket in (("memory", daemon.socket), ("storage", elsewhere.socket)):
        # In its first step DDP adds up the gradients of three ranks in another order than in all later ones.
        warm = source == "memory" or spread[0] == "ddp"
        begin(ranks, tmp_path, socket, tmp_run, spread, of={"seed": 9, "lr": 0.9, "warm": warm})
        assert {answer["source"] for answer in ranks.each("restore")} == {source}
        assert ranks.each("run", steps=STEPS) == losses
        assert values_of(ranks) == after
        end(ranks)


def test_layouts_through_object_storage(
    ranks: Ranks, daemon: Daemon, elsewhere: Daemon, s3_server: S3Endpoint, tmp_path: Path
) -> None:
    socket = elsewhere.socket
    for saver, other in ((("fsdp2", 4), ("ddp", 3)), (("mesh2d", 4), ("single", 1)), (("single", 1), ("tp", 3))):
        options = {"storage_options": dict(s3_server.options)}
        before = saved(ranks, tmp_path, daemon.socket, s3_server.prefix(), saver, **options)
        begin(ranks, tmp_path, socket, before.url, other, of={"seed": 9, "lr": 0.9}, **options)
        check_restored(ranks, before, "storage", saver[1])
        end(ranks)


def test_random_numbers_go_on_or_are_new(
    ranks: Ranks, runs: dict[tuple[str, int], Before], elsewhere: Daemon, tmp_path: Path
) -> None:
    """On as many ranks as saved, each has its own stream again; on others, streams that no rank had, said so, and other
    ones from another checkpoint."""
    before, socket = runs["ddp", 4], elsewhere.socket
    assert len({digests["torch"] for digests in before.generators}) == 4
    streams: dict[int, list[dict[str, str]]] = {}
    for world in (4, 3, 2, 3):
        begin(ranks, tmp_path, socket, before.url, ("ddp", world), of={"seed": 9})
        answers = ranks.each("restore")
        told = [[notice for notice in answer["notices"] if notice.startswith("rng: ")] for answer in answers]
        if world == 4:
            assert told == [[]] * 4
            assert values_of(ranks)[1] == before.generators
        else:
            assert all("saved by 4 ranks" in notice for (notice,) in told)
            found = values_of(ranks)[1]
            assert streams.setdefault(world, found) == found  # the same at every restore
            for kind in ("python", "numpy", "torch"):
                old = {digests[kind] for digests in before.generators}
                new = [digests[kind] for digests in found]
                assert len({*old, *new}) == 4 + world
        end(ranks)
    begin(ranks, tmp_path, socket, runs["ddp", 3].url, ("ddp", 2), of={"seed": 9})
    ranks.each("restore")
    for one, other in zip(values_of(ranks)[1], streams[2], strict=True):
        assert not set(one.items()) & set(other.items())


def test_what_all_ranks_drew_from_alike_goes_on_on_any_number(
    ranks: Ranks, runs: dict[tuple[str, int], Before], elsewhere: Daemon, tmp_path: Path
) -> None:
    before, socket = runs["tp", 4], elsewhere.socket
    begin(ranks, tmp_path, socket, before.url, ("tp", 2), of={"seed": 9})
    assert [answer["notices"] for answer in ranks.each("restore")] == [[], []]
    assert values_of(ranks)[1] == before.generators[:2]


# Parts


def test_weights_only_takes_the_model_and_nothing_else(
    ranks: Ranks, runs: dict[tuple[str, int], Before], elsewhere: Daemon, tmp_path: Path
) -> None:
    """It opens none of the optimizer's bytes: every one of them is another than was saved."""
    before = runs["hsdp", 4]
    root = tmp_path / "copy"
    shutil.copytree(before.url.removeprefix("file://"), root)
    spoil(root, "optimizer/")
    socket = elsewhere.socket
    begin(ranks, tmp_path, socket, f"file://{root}", ("fsdp2", 3), of={"seed": 9, "warm": True})
    own = values_of(ranks)[0]
    answers = ranks.each("restore", weights_only=True)
    assert {answer["step"] for answer in answers} == {STEPS}
    assert {name for answer in answers for name in answer["loaded"] if not name.startswith("model/")} == set()
    after = values_of(ranks)[0]
    assert {name for name in after if after[name] != before.values[name] and name.startswith("model/")} == set()
    assert {name for name in after if after[name] != own[name] and not name.startswith("model/")} == set()
    end(ranks)
    begin(ranks, tmp_path, socket, f"file://{root}", ("fsdp2", 3))
    with pytest.raises(RankError, match="differ from their digest"):
        ranks.each("restore")


def spoil(root: Path, prefix: str) -> None:
    """Change every stored byte of the tensors below a name."""
    for path in root.glob("checkpoints/*/rank-*.json"):
        receipt = decode(path.read_bytes(), Receipt)
        shard = root / receipt.shard.key
        data = bytearray(shard.read_bytes())
        for entry in decode_layout(decode(receipt.snapshot, Snapshot).layout).tensors:
            if entry.name.startswith(prefix):
                for piece in entry.pieces:
                    data[piece.at : piece.at + piece.bytes] = bytes(
                        255 - byte for byte in data[piece.at : piece.at + piece.bytes]
                    )
        shard.write_bytes(data)


def test_a_part_is_taken_by_patterns(
    ranks: Ranks, runs: dict[tuple[str, int], Before], elsewhere: Daemon, tmp_path: Path
) -> None:
    before, socket = runs["tp", 3], elsewhere.socket

    def taken(**options: Any) -> set[str]:
        begin(ranks, tmp_path, socket, before.url, ("mesh2d", 4), of={"seed": 9, "lr": 0.9, "warm": True})
        own = values_of(ranks)[0]
        ranks.each("restore", **options)
        after = values_of(ranks)[0]
        end(ranks)
        new = {name for name in after if after[name] == before.values[name]}
        assert all(after[name] == own[name] for name in after if name not in new)
        return new - {name for name in own if own[name] == before.values[name]}

    blocks = {name for name in before.values if name.startswith("model/blocks.0.")}
    assert taken(include=["model/blocks.0.*"]) == blocks
    everything = taken()
    assert blocks < everything
    assert taken(exclude=["optimizer/param_groups", "model/blocks.0.up.*"]) == {
        name
        for name in everything
        if not name.startswith("group/") and name not in ("model/blocks.0.up.weight", "model/blocks.0.up.bias")
    }


@pytest.mark.parametrize("saved_world", [1, 4])
def test_each_rank_reads_little_more_than_its_own(
    ranks: Ranks, daemon: Daemon, elsewhere: Daemon, tmp_path: Path, tmp_run: str, saved_world: int
) -> None:
    """64 MB in runs of 8 MiB: bytes are those that are needed, once over all ranks, and requests grow with the ranks
    and the windows, not with ranks times ranks."""
    rows, row_bytes = 8, 8 * MIB
    of = {"rows": rows, "row_bytes": row_bytes}
    begin(ranks, tmp_path, daemon.socket, tmp_run, ("rows", saved_world), of=of)
    ranks.each("restore")
    ranks.each("save_as_it_is", step=STEPS)
    before = values_of(ranks)[0]
    end(ranks)
    socket = elsewhere.socket
    requests: dict[int, int] = {}
    for world in (1, 2, 3, 4):
        begin(ranks, tmp_path, socket, tmp_run, ("rows", world), of={**of, "seed": 9})
        answers = ranks.each("restore_counted")
        assert {answer["source"] for answer in answers} == {"storage"}
        assert values_of(ranks)[0] == before
        read = [answer["counts"]["read_into"] for answer in answers]
        records = sum(answer["counts"]["get"][1] for answer in answers)
        assert sum(size for _, size in read) + records <= 1.05 * rows * row_bytes
        # At most a window is added by each cut between two ranks' rows.
        assert sum(calls for calls, _ in read) <= rows + saved_world + world
        requests[world] = sum(calls for answer in answers for calls, _ in answer["counts"].values())
        end(ranks)
    for world in (2, 3, 4):
        assert requests[world] <= world * requests[1]
