"""The benchmark runs, every subject's checkpoints read back equal, and the results hold what is promised."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench import subjects
from bench.__main__ import size
from bench.plot import plot
from bench.report import report
from bench.run import FORMAT, Results, run
from bench.settings import Settings
from bench.subjects.memcpy import Eager
from bench.summary import interval, quiet, summarize
from bench.turn import Bench

pytestmark = pytest.mark.timeout(300)

TINY = Settings(
    state_bytes=4_000_000,
    tensors=16,
    rounds=1,
    saves=1,
    warm_ups=0,
    restores=1,
    patience_seconds=0,
    step_seconds=0.005,
)
SAVE_FIELDS = {"call", "fence", "durable", "lost", "memcpy", "undisturbed_step", "own_threads_cpu", "foreign_cores"}
NEED_OWN_PROCESS = ("dcp.async_save, process, all options", "dcp experimental")
"""They leave processes to the end of theirs."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """As ``python -m bench`` has them, but that most subjects have their turn in this process, which is faster."""
    found = run(TINY, [subjects.FLOOR, *NEED_OWN_PROCESS], tmp_path_factory.mktemp("bench"), lambda *_: None)
    for name in subjects.SUBJECTS:
        if name not in found["subjects"]:
            turn = asdict(Bench(name, TINY, tmp_path_factory.mktemp("turn")).run())
            found["machine"] = turn.pop("machine")
            found["subjects"][name] = [turn]
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_each_subject_reads_back_what_it_saved(results: Results, name: str) -> None:
    (turn,) = results["subjects"][name]
    assert "error" not in turn, turn["error"]  # a checkpoint that reads back differently is one
    assert turn["stored_bytes"] >= turn["state_bytes"]
    assert len(turn["saves"]) >= TINY.saves
    for save in [turn["first"], *turn["saves"]]:
        assert save.keys() >= SAVE_FIELDS
        assert 0 < save["call"] <= save["durable"]
    assert {"cold", "warm"} <= turn["restore"].keys()


def test_only_what_keeps_snapshots_restores_from_memory(results: Results) -> None:
    found = {name for name, (turn,) in results["subjects"].items() if "memory" in turn["restore"]}
    assert found == {subjects.FLOOR, subjects.OVERLAPPED_FLOOR, subjects.OURS, subjects.OURS_EAGER}


def test_results_name_no_host_and_no_folder(results: Results) -> None:
    import getpass
    import socket

    assert results["format"] == FORMAT
    assert results["machine"].keys() >= {"cores", "memory_gib", "kernel", "file_system"}
    text = json.dumps(results)
    assert "/" + "tmp" not in text
    assert socket.gethostname() not in text
    assert f"/home/{getpass.getuser()}" not in text


def test_tables_and_plot_show_every_subject_and_the_goals(results: Results) -> None:
    text = report(results)
    figures, failed = summarize(results)
    assert failed == {}
    drawn = "".join(ElementTree.fromstring(plot(figures)).itertext())
    for name in subjects.SUBJECTS:
        assert text.count(f"| {name} |") >= 3  # ratios, seconds, promises
        assert name in drawn
    assert "lost, against the best peer" in text


def test_a_failed_subject_is_reported_and_the_others_stand(results: Results) -> None:
    broken = {**results, "subjects": {**results["subjects"], "torch.save": [{"error": "OSError: no room"}]}}
    text = report(broken)
    assert "- torch.save failed: OSError: no room" in text
    assert f"| {subjects.OURS} |" in text


class Liar(Eager):
    """Restores all but one element of one tensor."""

    def restore(self, step: int) -> None:
        super().restore(step)
        with torch.no_grad():
            next(self.state.model.parameters()).view(-1)[-1] += 1


def test_a_checkpoint_that_reads_back_differently_fails_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "load", lambda name: Liar)
    with pytest.raises(ValueError, match="reads back differently"):
        Bench("liar", TINY, tmp_path).run()


def test_the_state_has_the_size_and_the_tensors_asked_for(tmp_path: Path) -> None:
    from bench.state import TrainingState

    few, many = TrainingState(4_000_000, 100), TrainingState(4_000_000, 2000)
    for state, count in ((few, 100), (many, 2000)):
        tensors = state.tensors()
        assert len(tensors) == count
        assert sum(tensor.nbytes for tensor in tensors.values()) == pytest.approx(4_000_000, rel=0.02)
    gpt = sum(tensor.nbytes for tensor in TrainingState(50_000_000, None).tensors().values())
    assert gpt == pytest.approx(50_000_000, rel=0.02)


def test_disturbed_saves_are_left_out_only_where_enough_remain() -> None:
    calm = [{"foreign_cores": 0.1} for _ in range(5)]
    busy = [{"foreign_cores": 1.0 + number} for number in range(3)]
    assert quiet([*busy, *calm]) == calm
    assert quiet([*busy, *calm[:2]]) == [*calm[:2], *busy]


def test_the_interval_holds_the_median_and_widens_with_scatter() -> None:
    narrow, wide = interval([1.0, 1.1, 0.9, 1.0, 1.05]), interval([1.0, 3.0, -1.0, 1.0, 2.0])
    assert narrow[0] <= 1.0 <= narrow[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


@pytest.mark.parametrize(("text", "expected"), [("512MB", 512_000_000), ("1.5GB", 1_500_000_000), ("4096", 4096)])
def test_sizes_are_read_with_units(text: str, expected: int) -> None:
    assert size(text) == expected
