"""Nothing that was promised is lost with the power: the real store, commit and retention over a model of a disk.

``make power`` tells many more stories; ``make power ARGS="--first 17 --seeds 1"`` tells one again.
"""

from __future__ import annotations

import inspect
import random

import pytest

from ckptd_backends.files import Files
from tests.power.disk import Disk
from tests.power.files import ModelFiles
from tests.power.life import Story
from tests.power.promises import Broken
from tests.power.tiers import TieredStory
from tests.power.wrong import WRONG, WRONG_WITH_TIERS

FOUND_BY = {
    "receipt before shard": 1,
    "a receipt that is seen is taken to be durable": 7,
    "a manifest that is seen is taken to be durable": 1,
}
"""The first seed whose story shows it, other than 0: ``make power ARGS=--wrong`` looks for them."""
HURRIED = {"a manifest that is gone is taken to be gone for good"}
"""What a hurried story shows at once, and others hardly ever."""


@pytest.mark.parametrize("seed", range(4))
def test_r61_r67_power_loss_at_any_moment_leaves_the_old_or_the_new(seed: int) -> None:
    story = Story(seed)
    story.tell()
    assert story.promises.committed, "nothing was saved"
    assert story.promises.going, "nothing was deleted"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_done_wrong_is_found(name: str) -> None:
    with pytest.raises(Broken), WRONG[name]():
        Story(FOUND_BY.get(name, 0), hurried=name in HURRIED).tell()


def test_r61_a_hurried_story_too() -> None:
    Story(0, hurried=True).tell()


@pytest.mark.parametrize("seed", range(4))
def test_r61_r67_tiers_on_disks_that_are_lost_apart_from_each_other(seed: int) -> None:
    story = TieredStory(seed)
    story.tell()
    assert story.copied, "nothing was copied"
    assert any(place.promises.going for place in story.places), "nothing was deleted"


@pytest.mark.parametrize("name", WRONG_WITH_TIERS)
def test_what_is_done_wrong_with_tiers_is_found(name: str) -> None:
    with pytest.raises(Broken), WRONG_WITH_TIERS[name]():
        TieredStory(0).tell()


def test_a_story_can_be_told_again() -> None:
    told: list[tuple[int, list[str]]] = []
    for _ in range(2):
        story = Story(1)
        story.tell()
        told.append((story.changes, sorted(story.promises.allowed)))
    assert told[0] == told[1]


def test_the_model_stands_in_for_the_whole_seam() -> None:
    calls = {name for name, _ in inspect.getmembers(Files, inspect.isfunction) if not name.startswith("_")}
    assert calls <= set(vars(ModelFiles))


# What the model loses, and what it keeps


@pytest.fixture
def disk() -> Disk:
    return Disk("/disk")


@pytest.fixture
def files(disk: Disk) -> ModelFiles:
    return ModelFiles(disk)


def write(files: ModelFiles, path: str, data: bytes) -> int:
    descriptor = files.create(path)
    files.write(descriptor, memoryview(data), 0)
    return descriptor


def left(disk: Disk, chance: float = 0.0, seed: int = 0) -> dict[str, bytes]:
    found = disk.without_power(random.Random(seed), chance).files()
    assert found == disk.left(random.Random(seed), chance)
    return found


def test_a_synced_file_without_a_synced_name_is_lost(disk: Disk, files: ModelFiles) -> None:
    files.fsync(write(files, "/disk/a", b"x"))
    assert (left(disk), left(disk, 1.0)) == ({}, {"a": b"x"})
    files.fsync_directory("/disk")
    assert left(disk) == {"a": b"x"}


def test_a_synced_name_keeps_no_bytes_that_were_not_synced(disk: Disk, files: ModelFiles) -> None:
    descriptor = write(files, "/disk/a", b"old" * 1000)
    files.fsync(descriptor)
    files.fsync_directory("/disk")
    files.write(descriptor, memoryview(b"new" * 1000), 0)
    assert left(disk) == {"a": b"old" * 1000}
    found = {left(disk, 0.5, seed)["a"] for seed in range(20)}
    assert len(found) > 5, "a torn write is one of sectors"
    assert {data[start : start + 512] for data in found for start in range(0, 2560, 512)} <= {
        (word * 1000)[start : start + 512] for word in (b"old", b"new") for start in range(0, 2560, 512)
    }


def test_a_file_in_a_folder_that_was_not_synced_is_lost(disk: Disk, files: ModelFiles) -> None:
    files.make_directory("/disk/new")
    files.fsync(write(files, "/disk/new/a", b"x"))
    files.fsync_directory("/disk/new")
    assert left(disk) == {}


def test_a_rename_is_one_change_and_the_order_of_two_is_open(disk: Disk, files: ModelFiles) -> None:
    for name in ("a", "b"):
        files.fsync(write(files, f"/disk/{name}", name.encode()))
    files.fsync_directory("/disk")
    files.rename("/disk/a", "/disk/c")
    files.unlink("/disk/b")
    seen = {tuple(sorted(left(disk, 0.5, seed))) for seed in range(30)}
    assert seen == {("a", "b"), ("a",), ("b", "c"), ("c",)}


def test_a_lock_ends_with_its_process(disk: Disk, files: ModelFiles) -> None:
    assert files.lock(write(files, "/disk/a", b""))
    another = ModelFiles(disk)
    assert not another.lock(another.open_to_lock("/disk/a"))
    files.stopped = True
    assert another.lock(another.open_to_lock("/disk/a"))
