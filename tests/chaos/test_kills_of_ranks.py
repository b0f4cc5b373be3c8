"""One rank of several is killed and stopped at steps of the protocol, and no checkpoint mixes what ranks have."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.chaos.children import Nursery
from tests.chaos.matrix import Matrix, cells_of_a_rank


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_r125_ranks_are_never_mixed_whichever_dies_when(every: int, nursery: Nursery, private_folders: Path) -> None:
    """``every``: so many steps one is visited."""
    cells = cells_of_a_rank(0, every)
    matrix = Matrix(0, nursery, private_folders / uuid.uuid4().hex[:8], world=2)
    matrix.tell(cells)
    assert set(matrix.tally.points) == {cell.step.point for cell in cells}
    assert matrix.tally.kills >= 2 * sum(cell.fate == "kill" for cell in cells)
