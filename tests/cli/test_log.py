"""``ckptd log``: shown, drawn, and read back by those whom it is exported for."""

from __future__ import annotations

import asyncio
import csv
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ckptd.checkpoint.run import Run
from ckptd.cli.app import app
from ckptd.format.keys import Version
from ckptd.storage import open_backend
from tests.checkpoint.builder import flip, tamper
from tests.checkpoint.log_builder import put

EXIT_USAGE = 2


def ckptd(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["log", *map(str, arguments)])


def ckptd_json(*arguments: object) -> Any:
    done = ckptd(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def url(tmp_run: str) -> str:
    """A run whose second life has gone back two steps, and met a nan."""

    async def make() -> None:
        run = await Run.open(open_backend(tmp_run), create=True)
        await put(run, 1, range(1, 31), loss=2.5)
        await put(run, 2, range(29, 33), opened_from=Version(28, 1), loss=1.5)
        await put(run, 2, range(33, 34), first=5, opened_from=Version(28, 1), loss=math.nan)

    asyncio.run(make())
    return tmp_run


def test_it_is_shown(url: str) -> None:
    done = ckptd(url)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["step", "generation", "when", "took", "loss", "tokens"]
    assert len(lines) == 1 + 20
    assert lines[-1].split()[-2:] == ["nan", "33"]
    assert [line.split()[0] for line in lines if "rolled back" in line] == ["29", "30"]
    lines = ckptd(url, "--last", 2, "--columns", "loss").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "32", "33"]
    assert "tokens" not in lines[0]


def test_steps_are_chosen_and_programs_can_read_it(url: str) -> None:
    found = ckptd_json(url, "--steps", "28:31")
    assert [(row["generation"], row["step"], row["rolled_back"]) for row in found["rows"]] == [
        (1, 28, False),
        (1, 29, True),
        (1, 30, True),
        (2, 29, False),
        (2, 30, False),
    ]
    assert found["columns"] == ["loss", "tokens"]
    newest = ckptd_json(url, "--steps", "30:", "--last", 1)["rows"]
    assert [row["values"] for row in newest] == [{"loss": "nan", "tokens": 33.0}]
    assert ckptd_json(url, "--rank", 4) == {"columns": [], "rows": [], "missing": [], "notes": []}
    assert "has no training log" in ckptd(url, "--rank", 4).stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["--steps", "5"], "1000:2000"), (["--steps", "a:b"], "1000:2000"), (["--columns", "lss"], "it has loss, tokens")],
)
def test_what_makes_no_sense_is_refused(url: str, wrong: list[str], said: str) -> None:
    done = ckptd(url, *wrong)
    assert (done.exit_code, said in done.stderr) == (EXIT_USAGE, True)


def test_damage_is_named_and_the_rest_is_shown(url: str) -> None:
    key = next(path for path in Path(url.removeprefix("file://")).glob("log/000001/*.json"))

    async def damage() -> None:
        await tamper(open_backend(url), f"log/000001/{key.name}", flip(-30))

    asyncio.run(damage())
    done = ckptd(url)
    assert done.exit_code == 0
    assert key.name in done.stderr
    assert "generation 1: 30 steps missing" in done.stderr
    assert len(done.stdout.splitlines()) == 1 + 5


def test_csv_is_read_back(url: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("what was there")
    assert ckptd(url, "--csv", path).exit_code == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 35
    assert list(rows[0]) == ["generation", "step", "unix_seconds", "step_seconds", "rolled_back", "loss", "tokens"]
    assert (rows[0]["step"], float(rows[0]["loss"]), rows[0]["rolled_back"]) == ("1", 2.5, "False")
    assert math.isnan(float(rows[-1]["loss"]))
    done = ckptd(url, "--csv", tmp_path / "nowhere" / "log.csv")
    assert (done.exit_code, "nowhere" in done.stderr) == (3, True)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["log.csv", "run"]


def test_parquet_is_read_back_by_its_library(url: str, tmp_path: Path) -> None:
    parquet: Any = importlib.import_module("pyarrow.parquet")

    async def more() -> None:
        run = await Run.open(open_backend(url))
        await put(run, 2, range(34, 35), first=6, opened_from=Version(28, 1), loss=1.0)

    asyncio.run(more())
    path = tmp_path / "log.parquet"
    assert ckptd(url, "--parquet", path).exit_code == 0
    table = parquet.read_table(path)
    assert table.column_names == [
        "generation", "step", "unix_seconds", "step_seconds", "rolled_back", "loss", "tokens",
    ]  # fmt: skip
    rows = table.to_pylist()
    assert len(rows) == 36
    assert [row["step"] for row in rows if row["rolled_back"]] == [29, 30]
    assert math.isnan(rows[-2]["loss"])
    assert rows[-1] == {
        "generation": 2, "step": 34, "unix_seconds": 1.8e9, "step_seconds": 0.5, "rolled_back": False,
        "loss": 1.0, "tokens": 34.0,
    }  # fmt: skip


def test_tensorboard_reads_it_back(url: str, tmp_path: Path) -> None:
    assert ckptd(url, "--tensorboard", tmp_path / "events").exit_code == 0
    program = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1], size_guidance={'tensors': 0}).Reload()\n"
        "from tensorboard.util import tensor_util\n"
        "print(json.dumps({tag: [[e.step, e.wall_time, float(tensor_util.make_ndarray(e.tensor_proto))]\n"
        "  for e in found.Tensors(tag)] for tag in found.Tags()['tensors']}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "events"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert sorted(read) == ["loss", "step_seconds", "tokens"]
    assert [step for step, _, _ in read["loss"]] == list(range(1, 34))
    assert read["loss"][0] == [1, 1.8e9, 2.5]
    assert math.isnan(read["loss"][-1][2])


def test_it_is_drawn(url: str) -> None:
    done = ckptd(url, "--plot", "loss", "--plot", "tokens")
    assert done.exit_code == 0, done.stderr
    assert "loss" in done.stdout
    assert "tokens" in done.stdout
    assert any(mark in done.stdout for mark in "▘▝▖▗▚▞▌▐█")
    assert ckptd(url, "--plot", "lss").exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("option", "library"), [("--parquet", "pyarrow"), ("--tensorboard", "tensorboard"), ("--plot", "plotext")]
)
def test_a_library_that_is_not_there_is_named_with_its_extra(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, library: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    done = ckptd(url, option, "loss" if option == "--plot" else tmp_path / "out")
    assert done.exit_code == EXIT_USAGE
    assert library in done.stderr
    assert "pip install 'ckptd[log]'" in done.stderr


def test_a_picture_of_many_steps_shows_a_single_spike(tmp_run: str) -> None:
    async def make() -> None:
        run = await Run.open(open_backend(tmp_run), create=True)
        for first in range(1, 9001, 1000):
            await put(run, 1, range(first, first + 1000), first=first, loss=1.0)
        await put(run, 1, range(9001, 9002), first=9001, loss=77.0)
        await put(run, 1, range(9002, 10_002), first=9002, loss=1.0)

    asyncio.run(make())
    done = ckptd(tmp_run, "--plot", "loss")
    assert done.exit_code == 0, done.stderr
    assert "77" in done.stdout
