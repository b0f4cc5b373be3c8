"""Trainers and daemons are killed and stopped at steps of the protocol and at any instant, and nothing is lost.

``make chaos`` does more of it; ``make chaos ARGS="--seed 17 --kills 12"`` tells one story again, and
``make chaos ARGS="--seed 17 --matrix --kills 1"`` goes through all steps for all victims.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from devtools.seaweedfs import S3Endpoint
from tests.chaos.children import Nursery
from tests.chaos.matrix import Matrix, some_cells
from tests.chaos.steps import STEPS
from tests.chaos.story import Story

SEEDS = {100: 12}
"""Seed → how many kills, at least."""
S3_SEED, S3_KILLS = 104, 3


@pytest.mark.timeout(900)
def test_r124_r134_r144_nothing_is_lost_or_mixed_at_any_step(nursery: Nursery, private_folders: Path) -> None:
    matrix = Matrix(0, nursery, private_folders / uuid.uuid4().hex[:8], world=1)
    matrix.tell(some_cells(0))
    assert set(matrix.tally.points) == {step.point for step in STEPS}
    assert matrix.tally.kills >= len(STEPS)
    assert matrix.tally.stops >= len(STEPS)


@pytest.mark.parametrize("seed", SEEDS)
def test_r124_r125_r134_r144_nothing_is_lost_or_mixed(seed: int, nursery: Nursery, private_folders: Path) -> None:
    story = Story(seed, nursery, private_folders / uuid.uuid4().hex[:8])
    story.tell(SEEDS[seed])
    assert story.tally.kills >= SEEDS[seed]
    assert story.tally.checkpoints


def test_r97_nothing_is_lost_or_left_on_s3(nursery: Nursery, private_folders: Path, s3_server: S3Endpoint) -> None:
    story = Story(S3_SEED, nursery, private_folders / uuid.uuid4().hex[:8], s3_server)
    story.tell(S3_KILLS)
    assert story.tally.checkpoints
