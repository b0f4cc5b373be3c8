"""Hypothesis for the tests of pure functions: how long an example takes says nothing on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pure", deadline=None)
settings.load_profile("pure")
