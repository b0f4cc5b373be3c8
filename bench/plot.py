"""Bars as SVG, by hand: a plot needs no library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from bench.subjects import OURS, OURS_EAGER
from bench.summary import Figures

WIDTH, ROW, LABEL, PANEL = 860, 22, 260, 300
_COLOUR = {OURS: "#2563eb", OURS_EAGER: "#60a5fa"}
_OTHERS = "#9ca3af"

_PANELS: tuple[tuple[str, Callable[[Figures], float]], ...] = (
    ("training time lost per save, s", lambda found: max(found.lost, 0.0)),
    ("save → durable, s", lambda found: found.durable),
)


def plot(figures: Mapping[str, Figures]) -> str:
    """Two panels of bars side by side, one row a subject."""
    height = ROW * (len(figures) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for row, name in enumerate(figures):
        parts.append(f'<text x="{LABEL - 8}" y="{_baseline(row)}" text-anchor="end">{escape(name)}</text>')
    for number, (title, value) in enumerate(_PANELS):
        left = LABEL + number * PANEL
        largest = max(value(found) for found in figures.values()) or 1.0
        parts.append(f'<text x="{left}" y="{ROW - 7}" font-weight="bold">{escape(title)}</text>')
        for row, (name, found) in enumerate(figures.items()):
            length = value(found) / largest * (PANEL - 70)
            top, colour = ROW * (row + 1) + 4, _COLOUR.get(name, _OTHERS)
            parts.append(
                f'<rect x="{left}" y="{top}" width="{max(length, 1):.1f}" height="{ROW - 8}" fill="{colour}"/>'
            )
            parts.append(f'<text x="{left + length + 5:.1f}" y="{_baseline(row)}">{value(found):.3f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _baseline(row: int) -> int:
    return ROW * (row + 1) + ROW - 8
