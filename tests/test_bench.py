"""The benchmark runs, every subject's checkpoints read back equal, and the results hold what is promised."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench import docs, environments, ranks, s3, subjects
from bench.__main__ import size
from bench.plans import PLANS
from bench.plot import plot, plot_scaling
from bench.report import brief, report
from bench.run import FORMAT, Results, last_words, run
from bench.s3_ways import WAYS
from bench.settings import Settings
from bench.subjects import SUBJECTS, Entry
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
HERE = [*list(SUBJECTS)[:4], "dcp.async_save, thread, kept stager"]
"""The floors, ckptd, and a few peers that need nothing but this environment."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """As ``python -m bench`` has them, but that most subjects have their turn in this process, which is faster."""
    folder = Path(os.path.relpath(tmp_path_factory.mktemp("bench")))
    found = run(TINY, [subjects.OURS], folder, lambda *_: None)
    for name in HERE:
        if name not in found["subjects"]:
            turn = asdict(Bench(name, TINY, tmp_path_factory.mktemp("turn")).run())
            found["machine"] = turn.pop("machine")
            found["subjects"][name] = [turn]
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("name", HERE)
def test_each_subject_reads_back_what_it_saved(results: Results, name: str) -> None:
    (turn,) = results["subjects"][name]
    assert "error" not in turn, turn["error"]  # a checkpoint that reads back differently is one
    assert turn["stored_bytes"] >= turn["state_bytes"]
    assert len(turn["saves"]) >= TINY.saves
    for save in [turn["first"], *turn["saves"]]:
        assert save.keys() >= SAVE_FIELDS
        assert 0 < save["call"] <= save["durable"]
    assert {"cold", "warm"} <= turn["restore"].keys()


@pytest.mark.long
def test_further_subjects_read_back_what_they_saved(tmp_path: Path) -> None:
    names = [name for name, entry in SUBJECTS.items() if entry.environment is None and name not in HERE]
    found = run(TINY, names, tmp_path, lambda *_: None)["subjects"]
    assert {name: turn.get("error") for name in names for turn in found[name]} == dict.fromkeys(names)


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
    for name in HERE:
        assert text.count(f"| {name} |") >= 3  # ratios, seconds, promises
        assert name in drawn
    assert "lost, against the best peer" in text


def test_a_failed_subject_is_reported_and_the_others_stand(results: Results) -> None:
    broken = {**results, "subjects": {**results["subjects"], "torch.save": [{"error": "OSError: no room"}]}}
    assert "| torch.save | OSError: no room |" in report(broken)
    text = brief(broken, "results/name")
    assert "| torch.save | not measured: OSError: no room |" in text
    assert f"| {subjects.OURS} |" in text


def test_a_peer_that_cannot_be_installed_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pins(tmp_path, monkeypatch, "--no-index\nno-such-peer==1.0\n")
    monkeypatch.setitem(SUBJECTS, "a peer", Entry("no_such_peer:Peer", "peer"))
    found = run(TINY, ["a peer"], tmp_path / "disk", lambda *_: None)
    assert "no-such-peer" in found["subjects"]["a peer"][0]["error"]
    assert "| a peer |" in report(found)


def test_an_environment_sees_this_one_and_is_made_anew_with_other_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = _pins(tmp_path, monkeypatch, "# nothing\n")
    python = environments.interpreter("peer", tmp_path / "venvs")
    looks = "import importlib.util as i, sys; print(i.find_spec('torch').origin, sys.prefix)"
    said = subprocess.run([python, "-c", looks], capture_output=True, text=True, check=True).stdout.split()
    assert said == [torch.__file__, str(tmp_path / "venvs" / "peer")]
    left = python.parent / "left"
    left.touch()
    assert environments.interpreter("peer", tmp_path / "venvs") == python
    assert left.exists()
    pins.write_text("# nothing else\n")
    environments.interpreter("peer", tmp_path / "venvs")
    assert not left.exists()


def _pins(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    monkeypatch.setattr(environments, "PINS", folder)
    monkeypatch.setattr(environments, "ENVIRONMENTS", folder / "venvs")
    (folder / "peer.txt").write_text(text)
    return folder / "peer.txt"


def test_every_environment_has_pins_and_none_of_them_torch() -> None:
    for name in {entry.environment for entry in SUBJECTS.values()} - {None}:
        pins = (environments.PINS / f"{name}.txt").read_text().split()
        assert pins
        assert all("==" in pin and not pin.startswith("torch==") for pin in pins)


def test_plans_name_subjects_and_no_two_runs_write_the_same_results() -> None:
    assert {name for plan in PLANS.values() for name in plan.subjects} == SUBJECTS.keys()
    names = [settings.name for plan in PLANS.values() for settings in plan.runs]
    assert len(names) == len(set(names))
    assert all(settings.rounds * settings.saves >= 20 for settings in PLANS["lost"].runs)


def test_the_page_has_the_tables_of_the_results() -> None:
    page = docs.PAGE.read_text()
    assert docs.with_tables(page, docs.tables(docs.RESULTS)) == page


def test_the_page_and_the_plots_are_written_from_results(results: Results, tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "results"
    folder.mkdir()
    for count in (16, 32):
        changed = {**results, "settings": {**results["settings"], "tensors": count}}
        (folder / f"{count}.json").write_text(json.dumps(changed))
    page.write_text(f"before\n{docs.BEGIN}\nof yesterday\n{docs.END}\nafter\n")
    docs.write(folder, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "of yesterday" not in text
    assert text.count(f"| {subjects.OURS} |") == 2
    assert {path.name for path in folder.glob("*.svg")} == {"16.svg", "32.svg", "over-tensors.svg"}
    figures, _ = summarize(results)
    assert plot(figures) == plot(figures)
    assert "over-gb" not in plot_scaling([(1, figures), (2, figures)], "GB")
    with pytest.raises(ValueError, match="no place for the tables"):
        docs.with_tables("nothing", "")


def test_the_words_of_a_failure_are_the_exceptions_not_what_others_log_after_it() -> None:
    text = "Traceback:\n  File x\n[rank0]: OSError: [Errno 24] Too many open files: '/place/of/a'\nINFO - still here\n"
    assert last_words(text, 1) == "OSError: [Errno 24] Too many open files: 'a'"
    assert last_words("", -9) == "ended with -9"


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
    mixed = TrainingState(4_000_000, 100, "bf16").tensors()
    assert (len(mixed), {tensor.dtype for tensor in mixed.values()}) == (100, {torch.float32, torch.bfloat16})
    assert sum(tensor.nbytes for tensor in mixed.values()) == pytest.approx(4_000_000, rel=0.02)
    gpt = sum(tensor.nbytes for tensor in TrainingState(50_000_000, None).tensors().values())
    assert gpt == pytest.approx(50_000_000, rel=0.02)


def test_a_state_in_bf16_trains_and_is_loaded_back() -> None:
    from bench.state import Replica, TrainingState

    state = TrainingState(400_000, 50, "bf16")
    replica = Replica(state)
    replica.take()
    saved = copy.deepcopy(state.state_dict())
    for _ in range(100):  # bf16 has no room for one step
        state.step()
    assert replica.differing() is not None
    state.load_state_dict(saved)
    assert replica.differing() is None


def test_disturbed_saves_are_left_out_only_where_enough_remain() -> None:
    calm = [{"foreign_cores": 0.1} for _ in range(5)]
    busy = [{"foreign_cores": 1.0 + number} for number in range(3)]
    assert quiet([*busy, *calm]) == calm
    assert quiet([*busy, *calm[:2]]) == [*calm[:2], *busy]


def test_the_interval_holds_the_median_and_widens_with_scatter() -> None:
    narrow, wide = interval([1.0, 1.1, 0.9, 1.0, 1.05]), interval([1.0, 3.0, -1.0, 1.0, 2.0])
    assert narrow[0] <= 1.0 <= narrow[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


def test_every_way_to_s3_moves_the_bytes_and_verifies_them(tmp_path: Path) -> None:
    found = s3.against_sink(20_000_000, 1, tmp_path)  # raises where bytes or checksums are missing at the sink
    assert found["upload"].keys() == found["download"].keys() == found["memory"].keys() == WAYS.keys()
    result = {"bytes": 20_000_000, "rounds": 1, "machine": {"cores": 2}, "sink": found}
    text = s3.report({**result, "server": {"upload": {s3.OURS: found["upload"][s3.OURS]}}})
    assert text.count(f"| {s3.OURS} |") == 3


def test_what_arrives_from_s3_wrong_is_noticed() -> None:
    memory = s3.content(20_000_000)
    verify = s3.Verifier(memory)
    verify(0, memory[: 16 * 2**20])
    memory[5] ^= 1
    with pytest.raises(ValueError, match="the part at byte 0 is not what was sent"):
        verify(0, memory[: 16 * 2**20])


def test_the_daemons_costs_are_split_into_saves_and_bytes() -> None:
    def world(size: int, cpu: float, loop: float) -> dict[str, object]:
        costs = {"daemon_cpu_seconds": cpu, "loop_cpu_seconds": loop}
        costs |= {"daemon_private_bytes": 2**25, "committed_seconds": [0.1]}
        return {"ranks": 2, "rank_bytes": size, "saves": 10, **costs}

    text = ranks.report({"worlds": [world(0, 0.2, 0.1), world(10**9, 4.2, 0.18)]})
    assert "| 2 | 20.0 | 10.0 | 5.0 | 0.20 | 0.004 | 32 | 100 | 100 |" in text


@pytest.mark.parametrize(("text", "expected"), [("512MB", 512_000_000), ("1.5GB", 1_500_000_000), ("4096", 4096)])
def test_sizes_are_read_with_units(text: str, expected: int) -> None:
    assert size(text) == expected
