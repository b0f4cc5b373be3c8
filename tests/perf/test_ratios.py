"""``pytest -m perf``: that nothing has become several times as slow as it was. Not in the default run.

Every figure is a ratio within one run, and every bound is at least twice as wide as what a quiet machine shows: on a
busy one these tests may fail, and then say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest

from bench import ranks, s3
from bench.run import Results, run
from bench.settings import MB, Settings
from bench.subjects import FLOOR, OURS, OURS_EAGER
from bench.summary import Figures, summarize

pytestmark = [pytest.mark.perf, pytest.mark.timeout(900)]

SETTINGS = Settings(
    state_bytes=64 * MB,
    rounds=1,
    saves=3,
    warm_ups=1,
    restores=1,
    patience_seconds=5,
    step_seconds=0.1,
    window_steps=3,
)
UPLOAD_BYTES = 256 * MB
MIB = 2**20


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Figures]:
    names = [FLOOR, OURS, OURS_EAGER, "torch.save", "dcp.save"]
    found: Results = run(SETTINGS, names, tmp_path_factory.mktemp("perf"), lambda *_: None)
    measured, failed = summarize(found)
    assert failed == {}
    return measured


def test_a_save_that_copies_at_once_stalls_for_a_few_bare_copies(figures: Mapping[str, Figures]) -> None:
    assert figures[OURS_EAGER].stall_in_memcpys < 4


def test_a_save_that_overlaps_stalls_for_less_than_a_bare_copy(figures: Mapping[str, Figures]) -> None:
    assert figures[OURS].stall_in_memcpys < 1


def test_a_save_costs_less_training_time_than_the_simple_ways(figures: Mapping[str, Figures]) -> None:
    for name in (OURS, OURS_EAGER):
        assert figures[name].lost < figures["torch.save"].lost
        assert figures[name].lost < figures["dcp.save"].lost / 2


def test_durable_comes_after_a_few_bare_writes(figures: Mapping[str, Figures]) -> None:
    for name in (OURS, OURS_EAGER):
        assert figures[name].durable < 5 * figures[name].direct_write
        assert figures[name].durable < figures["dcp.save"].durable


def test_a_restore_costs_a_few_bare_reads_and_more_from_storage_than_from_memory(
    figures: Mapping[str, Figures],
) -> None:
    found = figures[OURS]
    assert found.cold < 12 * found.direct_read
    assert found.from_memory is not None
    assert found.from_memory < 30 * found.memcpy


def test_nothing_is_held_beyond_the_arena_that_grows_with_the_state(figures: Mapping[str, Figures]) -> None:
    assert figures[OURS].memory_held < 2.1 * SETTINGS.state_bytes + 96 * MIB
    assert figures[OURS].memory_private < 192 * MIB


def test_the_daemon_takes_little_processor_time(figures: Mapping[str, Figures]) -> None:
    assert figures[OURS].other_cpu_per_gb < 1


def test_s3_takes_less_of_the_client_than_boto3s_transfer_manager(tmp_path: Path) -> None:
    found = s3.against_sink(UPLOAD_BYTES, 3, tmp_path)
    ours, theirs = (found["upload"][name] for name in (s3.OURS, "boto3 transfer manager"))
    assert median(ours["cpu"]) < median(theirs["cpu"]) / 2
    assert median(ours["seconds"]) < median(theirs["seconds"])
    best = min(median(sample["seconds"]) for name, sample in found["upload"].items() if name.startswith("boto3"))
    assert median(ours["seconds"]) < 2 * best
    assert found["memory"][s3.OURS] < 32 * MIB
    read = {name: median(sample["cpu"]) for name, sample in found["download"].items()}
    assert read[s3.OURS] < 2 * min(value for name, value in read.items() if name.startswith("boto3"))


def test_a_save_of_several_ranks_costs_the_daemon_little(tmp_path: Path) -> None:
    small = ranks.measure(2, ranks.SMALL_BYTES, 10, tmp_path / "small")
    large = ranks.measure(2, ranks.LARGE_BYTES, 5, tmp_path / "large")
    each = small["daemon_cpu_seconds"] / small["saves"]
    assert each < 0.2
    gigabytes = 2 * ranks.LARGE_BYTES / 1e9
    assert (large["daemon_cpu_seconds"] / large["saves"] - each) / gigabytes < 2
    assert large["daemon_private_bytes"] < 256 * MIB
