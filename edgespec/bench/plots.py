"""A bench's plots as inline SVG that takes colours and font from the page. Importing this imports matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from edgespec.bench.records import AUTOPILOT, PLAIN, Cost
from edgespec.bench.summary import Group, Point, Section, printable

# The page's custom properties, and their values on light paper; a drawing is made in these and refers to the names.
COLOURS = {
    "ink": "#1d2733",
    "muted": "#66707d",
    "line": "#d9dde3",
    "accent": "#b8480c",
    "neutral": "#93a4b8",
    "s1": "#1f6fb2",
    "s2": "#128469",
    "s3": "#8a4fa3",
    "s4": "#8c6d00",
    "s5": "#c2397a",
}
_SERIES = [COLOURS[f"s{i}"] for i in range(1, 6)]
_MARKERS = "osD^v"
_WIDTH_IN = 4.4
_LONGEST_NAME = 18
_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": COLOURS["line"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["ink"],
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def speeds(groups: Sequence[Group]) -> str:
    """Tokens/s of each arm: the median over prompts as a bar, the quartiles as a line."""
    shown = [g for g in groups if g.tokens_per_second]

    def draw(axes: Axes) -> None:
        colours = {PLAIN: COLOURS["muted"], AUTOPILOT: COLOURS["accent"]}
        for row, g in enumerate(shown):
            low, median, high = g.tokens_per_second
            axes.barh(row, median, height=0.62, color=colours.get(g.arm, COLOURS["neutral"]))
            axes.plot([low, high], [row, row], color=COLOURS["ink"], linewidth=1.4)
            axes.annotate(f"{median:.1f}", (max(high, median), row), (5, 0), textcoords="offset points", va="center")
        _name_rows(axes, [g.arm for g in shown])
        axes.set_xlim(0, max(g.tokens_per_second[2] for g in shown) * 1.14)
        axes.set_xlabel("tokens/s")

    return _svg(draw, 0.75 + 0.27 * len(shown), "Tokens per second by arm")


def speedups(points: Iterable[Point]) -> str:
    """The ratio of every point to plain decoding, in a row for each category."""
    ratios: dict[str, list[float]] = {}
    for p in points:
        if p.ratio is not None:
            ratios.setdefault(p.category, []).append(p.ratio)

    def draw(axes: Axes) -> None:
        for row, values in enumerate(ratios.values()):
            heights = row + np.random.default_rng(0).uniform(-0.26, 0.26, len(values)) * (len(values) > 1)
            axes.scatter(values, heights, s=17, color=COLOURS["accent"], alpha=0.7, linewidths=0)
            median = float(np.median(values))
            axes.plot([median, median], [row - 0.36, row + 0.36], color=COLOURS["ink"], linewidth=2)
        _name_rows(axes, list(ratios))
        axes.axvline(1.0, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlabel("tokens/s, autopilot / plain")

    return _svg(draw, 0.75 + 0.36 * len(ratios), "The autopilot's speedup by category")


def alphas(part: Section) -> str:
    """Acceptance by depth, a line for each drafter that drafted."""
    drawn = [(drafter, alpha) for drafter, alpha in part.alpha_by_drafter.items() if alpha]

    def draw(axes: Axes) -> None:
        for i, (drafter, alpha) in enumerate(drawn):
            colour = COLOURS["accent"] if drafter == AUTOPILOT else _SERIES[i % len(_SERIES)]
            _line(axes, range(1, len(alpha) + 1), alpha, colour, _MARKERS[i % len(_MARKERS)], drafter)
        axes.set_xlim(0.5, max(len(alpha) for _, alpha in drawn) + 0.5)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("depth in the draft")
        axes.set_ylabel("accepted / tested")

    return _svg(draw, 2.9, "Acceptance by depth")


def costs(curves: Sequence[Cost]) -> str:
    """v(m) = T(m) / T(1), a line for each position."""

    def draw(axes: Axes) -> None:
        for i, cost in enumerate(curves):
            rows = sorted(cost.rows)
            colour, marker = _SERIES[i % len(_SERIES)], _MARKERS[i % len(_MARKERS)]
            _line(axes, rows, [cost.rows[m] / cost.rows[1] for m in rows], colour, marker, f"position {cost.position}")
        axes.set_xlim(0.5, max(max(cost.rows) for cost in curves) + 0.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows m of a target forward")
        axes.set_ylabel("v(m) = T(m) / T(1)")

    return _svg(draw, 2.9, "Cost of a forward by its rows")


def _line(axes: Axes, x: Iterable[int], y: Sequence[float], colour: str, marker: str, name: str) -> None:
    axes.plot([*x], y, color=colour, marker=marker, markersize=4.5, linewidth=1.7, label=_short(name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.tick_params(axis="y", labelcolor=COLOURS["muted"])
    axes.legend(loc="best", labelcolor=COLOURS["ink"], handlelength=1.6)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names at the rows, the first on top."""
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _svg(draw: Callable[[Axes], None], height_in: float, title: str) -> str:
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": title})
        warnings.filterwarnings("ignore", "Glyph")  # the page's fonts draw what matplotlib's lack
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        drawing = io.BytesIO()
        figure.savefig(drawing, format="svg", transparent=True)
    return _inline(drawing.getvalue(), title)


def _inline(drawing: bytes, title: str) -> str:
    """Without what a stand-alone file needs: its size, its data about itself, its style sheet, names of its groups."""
    root = ElementTree.fromstring(drawing)
    for parent in [*root.iter()]:
        for child in [*parent]:
            if child.tag in (_SVG + "metadata", _SVG + "style"):
                parent.remove(child)
        if parent.tag == _SVG + "g":
            parent.attrib.pop("id", None)
        if style := parent.get("style"):
            parent.set("style", re.sub("#[0-9a-f]{6}", lambda m: _VARIABLES.get(m[0], m[0]), style))
        parent.tag = parent.tag.removeprefix(_SVG)
        parent.attrib = {name.removeprefix(_XLINK): value for name, value in parent.attrib.items()}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


_VARIABLES = {value: f"var(--{name})" for name, value in COLOURS.items()}
