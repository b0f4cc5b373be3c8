"""Hypothesis for the tests of pure functions: how long an example takes says nothing on a busy machine."""

from __future__ import annotations

import pytest
from hypothesis import settings

from ckptd.format import proof
from ckptd.format.derived import DerivedKept

settings.register_profile("pure", deadline=None)
settings.load_profile("pure")


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> DerivedKept:
    """What an earlier test has proved, perhaps under other limits, is forgotten. Returns where it is kept now."""
    fresh = DerivedKept()
    monkeypatch.setattr(proof, "_derived", fresh)
    return fresh
