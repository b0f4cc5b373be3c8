"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[str]


def table(head: Row, rows: Iterable[Row]) -> list[str]:
    """Its lines; all columns but the first are set to the right."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows)]
