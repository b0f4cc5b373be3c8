"""Every case of ``docs/cases.md`` has a test named after it, or says why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| R(?P<number>\d+)(?: ★)? \|[^|]+\|[^|]+\| (?P<tests>[^|]+) \|$")
TEST_NAME = re.compile(r"test_((?:r\d+_)+)")


def _cases() -> dict[str, str]:
    """Case number → what its last column says."""
    rows = [ROW.match(line) for line in (ROOT / "docs" / "cases.md").read_text().splitlines() if line.startswith("| R")]
    assert all(rows), "a row of docs/cases.md does not have the four columns"
    return {row["number"]: row["tests"] for row in rows if row}


def _tested() -> set[str]:
    """Case numbers in the names of this suite's tests."""
    names = (
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    matches = (TEST_NAME.match(name) for name in names)
    return {number for match in matches if match for number in re.findall(r"r(\d+)_", match[1])}


def _complaint(number: str, where: str, tested: set[str]) -> str | None:
    """What is wrong with one row, or nothing."""
    if where.startswith("not yet: "):
        if not where.removeprefix("not yet: ").strip():
            return f"R{number} gives no reason"
        return f"R{number} has a test by now: say so in docs/cases.md" if number in tested else None
    if where != f"`test_r{number}_*`":
        return f"R{number} names neither its tests nor a reason"
    return None if number in tested else f"R{number} has no test and gives no reason"


def test_every_case_is_tested_or_says_why_not() -> None:
    tested = _tested()
    complaints = [_complaint(number, where, tested) for number, where in _cases().items()]
    assert not (found := [complaint for complaint in complaints if complaint]), "\n".join(found)


def test_every_case_test_is_listed() -> None:
    assert _tested() <= set(_cases())
