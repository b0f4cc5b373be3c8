"""Plots as SVG. Same figures, same bytes: nothing of time or chance goes in."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

import matplotlib as _matplotlib
from matplotlib.figure import Figure as _Figure

from bench.subjects import FLOOR, OURS, OURS_EAGER, OVERLAPPED_FLOOR
from bench.summary import Figures

_COLOURS = {OURS: "#2563eb", OURS_EAGER: "#60a5fa", FLOOR: "#d1d5db", OVERLAPPED_FLOOR: "#d1d5db"}
_OTHERS = "#9ca3af"
_ROW_INCHES, _WIDTH_INCHES = 0.28, 10.0

matplotlib = cast(Any, _matplotlib)  # whose own types are incomplete
Figure = cast(Any, _Figure)
matplotlib.rcParams.update({"svg.hashsalt": "ckptd", "svg.fonttype": "none", "font.size": 9})


def plot(figures: Mapping[str, Figures]) -> str:
    """Lost time with its interval, and time to durable, one row a subject."""
    names = list(figures)[::-1]
    colours = [_COLOURS.get(name, _OTHERS) for name in names]
    figure = Figure(figsize=(_WIDTH_INCHES, _ROW_INCHES * len(names) + 0.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    lost = [figures[name].lost for name in names]
    bounds = [figures[name].lost_interval for name in names]
    below = [max(value - low, 0.0) for value, (low, _) in zip(lost, bounds, strict=True)]
    above = [max(high - value, 0.0) for value, (_, high) in zip(lost, bounds, strict=True)]
    left.barh(names, lost, color=colours, xerr=(below, above), error_kw={"elinewidth": 0.8})
    left.set_title("training time lost per save, s (95 %)")
    durable = right.barh(names, [figures[name].durable for name in names], color=colours)
    right.bar_label(durable, fmt="%.2f", padding=3)
    right.set_title("save → durable, s")
    right.margins(x=0.12)
    return _svg(figure)


def plot_scaling(found: Sequence[tuple[float, Mapping[str, Figures]]], quantity: str) -> str:
    """Lost time and time to durable over a quantity: for each of its values the figures of that run."""
    figure = Figure(figsize=(_WIDTH_INCHES, 4), layout="constrained")
    names = dict.fromkeys(name for _, figures in found for name in figures)
    panels = (("stall", "stall, s"), ("durable", "save → durable, s"))
    for axes, (field, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in names:
            points = [(at, max(getattr(figures[name], field), 1e-4)) for at, figures in found if name in figures]
            style = {"color": _COLOURS[name], "linewidth": 2} if name in _COLOURS else {"linewidth": 1}
            axes.loglog([at for at, _ in points], [value for _, value in points], marker="o", label=name, **style)
        axes.set_title(title)
        axes.set_xlabel(quantity)
    figure.legend(loc="outside right upper", fontsize=8)
    return _svg(figure)


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
