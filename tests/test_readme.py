"""What the README and the page on the API show is run: Python in order, commands after it. Links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([\w-]+))?\)")
CKPTD = Path(sysconfig.get_path("scripts")) / "ckptd"


def _blocks(document: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(document.read_text()) if found == language]


@pytest.fixture
def finished_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder in which a document's Python has run. The daemon that it started is drained at the end."""
    program = tmp_path / "program.py"
    program.write_text("\n".join(_blocks(ROOT / request.param, "python")))
    try:
        _run(tmp_path, sys.executable, "-W", "error", program)
        yield tmp_path
    finally:
        _run(tmp_path, CKPTD, "drain")


def _run(folder: Path, *argv: str | Path) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("finished_run", ["docs/api.md"], indirect=True)
def test_api_page_runs(finished_run: Path) -> None:
    manifests = sorted(path.name for path in (finished_run / "checkpoints/api/manifests").iterdir())
    assert [name.split("-")[0].lstrip("0") for name in manifests] == ["10", "20", "25"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("finished_run", ["README.md"], indirect=True)
def test_code_and_commands_run(finished_run: Path) -> None:
    commands = [line.split("#")[0].split()[1:] for line in README.splitlines() if line.startswith("ckptd ")]
    assert [argv[0] for argv in commands] == ["ls", "verify", "prune", "export", "log", "doctor", "status"]
    for argv in commands:
        url = "checkpoints/first"  # no bucket of that name is here
        _run(
            finished_run, CKPTD, *(url if word.startswith("s3://") else word.replace("24GiB", "1MiB") for word in argv)
        )
    assert {path.suffix for path in (finished_run / "out").iterdir()} == {".safetensors", ".json"}


def test_targets_that_it_names_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) == {"demo", "test"} <= targets


def test_debian_packages_are_those_of_ci() -> None:
    (named,) = re.findall(r"apt-get install ([\w -]+)`", README)
    (used,) = re.findall(r"^for package in ([\w -]+); do", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert sorted(named.split()) == sorted(used.split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken: list[str] = []
    for target, anchor in LINK.findall(document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path = document.parent / target if target else document
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
