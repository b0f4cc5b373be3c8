"""What tests that kill share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.children import Nursery


@pytest.fixture(scope="module")
def nursery(private_folders: Path) -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery
