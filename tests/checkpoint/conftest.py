"""A run in memory for each test."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import settings

from ckptd.checkpoint.run import Run
from ckptd.storage import Backend, open_backend

settings.register_profile("pure", deadline=None)
settings.load_profile("pure")


@pytest.fixture
def backend() -> Backend:
    """An empty store."""
    return open_backend(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
async def run(backend: Backend) -> Run:
    """A run without checkpoints."""
    return await Run.open(backend, create=True)
