"""Which source comes next: close to the weights over any run of samples, and the same wherever one begins to ask."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd_client.data.mixture import choices


@pytest.mark.parametrize("place", [0, 12_345, 10**12])
@pytest.mark.parametrize("weights", [[0.5, 0.5], [7.0, 2.0, 1.0], [0.1, 100.0, 3.0, 0.5]])
def test_any_run_is_close_to_the_weights(place: int, weights: list[float]) -> None:
    for count in (10, 1000, 20_000):
        shares = np.bincount(choices(weights, 42, place, count), minlength=len(weights))
        expected = np.array(weights) / sum(weights) * count
        assert np.abs(shares - expected).max() < 2 + np.log2(count) / 2


def test_a_choice_depends_on_the_place_alone() -> None:
    whole = choices([3.0, 1.0], 9, 2**40, 500).tolist()
    assert [choices([3.0, 1.0], 9, 2**40 + place, 1).item() for place in range(500)] == whole


def test_another_seed_is_another_sequence() -> None:
    assert choices([1.0, 1.0], 1, 0, 64).tolist() != choices([1.0, 1.0], 2**61, 0, 64).tolist()


def test_a_weight_too_small_to_count_gets_nothing() -> None:
    assert not choices([1.0, 1e-300, 1.0], 5, 0, 10_000).tolist().count(1)
