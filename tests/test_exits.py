"""One number for one meaning: what errors carry, what commands end with, and what the documentation says."""

from __future__ import annotations

import re
from pathlib import Path

from ckptd import errors
from ckptd.errors import CkptdError
from ckptd.exits import Exit

ROOT = Path(__file__).parent.parent


def test_every_error_ends_a_command_with_a_number_of_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptdError)]
    assert len(kinds) > 20
    assert all(isinstance(kind.exit_code, Exit) and kind.exit_code is not Exit.WELL for kind in kinds)


def test_the_documentation_has_all_of_them_and_no_other() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("Exit codes:") : text.index("## Health")]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [code.value for code in Exit]


def test_no_module_has_numbers_of_its_own() -> None:
    pattern = re.compile(r"(?:typer\.Exit|SystemExit|sys\.exit|os\._exit)\(\d|exit_code(?::[^=]+)? = \d|_EXIT = \d")
    for folder in ("ckptd", "client", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not pattern.search(path.read_text()), path
