"""The report's plots as inline SVG. Colours are custom properties of the page, so that they follow light and dark."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np

from edgespec.bench.runner import AUTOPILOT, PLAIN, Cost
from edgespec.bench.summary import Group, Point, Summary, make_printable

_WIDTH, _HEIGHT, _FONT = 320.0, 210.0, 10.5  # user units of the SVG
_TOP, _RIGHT, _BOTTOM = 6.0, 8.0, 36.0  # margins
_BAR_ROW, _DOT_ROW = 19.0, 26.0  # heights
_SERIES = ("s1", "s2", "s3", "s4", "s5")
_MARKERS = (
    "M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0",
    "M-3,-3h6v6h-6z",
    "M0,-4l4,4l-4,4l-4,-4z",
    "M0,-4l4,7h-8z",
    "M0,4l4,-7h-8z",
)
_MAX_NAME = 18  # characters

Span = tuple[float, float]


class Plot:
    """An SVG with an x axis from `x[0]` to `x[1]` and a y axis from `y[0]` at the bottom to `y[1]` at the top."""

    def __init__(self, title: str, height: float, left: float, x: Span, y: Span, top: float = _TOP) -> None:
        """`height` is that of the whole drawing; `left` and `top` are margins."""
        size = f"0 0 {_WIDTH:g} {height:g}"
        self._svg = Element("svg", {"viewBox": size, "role": "img", "aria-label": title, "font-size": f"{_FONT:g}"})
        self._x, self._y = x, y
        self._left, self._right, self._top, self._bottom = left, _WIDTH - _RIGHT, top, height - _BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a data point."""
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return self._left + across * (self._right - self._left), self._bottom - up * (self._bottom - self._top)

    def line(self, points: Iterable[tuple[float, float]], color: str, width: float, dash: str = "none") -> None:
        """Connect data points."""
        path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        stroke = f"stroke: var(--{color}); stroke-width: {width}; stroke-dasharray: {dash}"
        SubElement(self._svg, "path", d=path, style=f"fill: none; {stroke}")

    def bar(self, length: float, row: float, color: str) -> None:
        """A horizontal bar from 0 to `length`, 0.62 rows high, centered at `row`."""
        (x, top), (end, bottom) = self.at(0, row - 0.31), self.at(length, row + 0.31)
        size = {"width": f"{end - x:.1f}", "height": f"{bottom - top:.1f}"}
        SubElement(self._svg, "rect", size, x=f"{x:.1f}", y=f"{top:.1f}", style=f"fill: var(--{color})")

    def dot(self, x: float, y: float, color: str) -> None:
        """A translucent dot at a data point."""
        cx, cy = self.at(x, y)
        style = f"fill: var(--{color}); opacity: 0.7"
        SubElement(self._svg, "circle", cx=f"{cx:.1f}", cy=f"{cy:.1f}", r="2.4", style=style)

    def marker(self, place: tuple[float, float], shape: str, color: str) -> None:
        """A marker at a place of the drawing."""
        move = f"translate({place[0]:.1f} {place[1]:.1f})"
        SubElement(self._svg, "path", d=shape, transform=move, style=f"fill: var(--{color})")

    def text(self, place: tuple[float, float], text: str, color: str, anchor: str = "start", turn: int = 0) -> None:
        """Text at a place of the drawing, vertically centered."""
        x, y = place[0], place[1] + 0.35 * _FONT * (turn == 0)
        attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "style": f"fill: var(--{color})"}
        if turn:
            attributes["transform"] = f"rotate({turn} {x:.1f} {y:.1f})"
        SubElement(self._svg, "text", attributes).text = text

    def x_axis(self, label: str, *, integers: bool = False) -> None:
        """Grid lines, numbers below them and the axis label."""
        numbers = _choose_ticks(*self._x, integers=integers)
        for value, number in numbers:
            self.line([(value, self._y[0]), (value, self._y[1])], "line", 0.6)
            self.text((self.at(value, 0)[0], self._bottom + 10), number, "muted", "middle")
        self.text(((self._left + self._right) / 2, self._bottom + 26), label, "muted", "middle")

    def y_axis(self, label: str) -> None:
        """Grid lines, numbers beside them and the axis label."""
        for value, number in _choose_ticks(*self._y):
            self.line([(self._x[0], value), (self._x[1], value)], "line", 0.6)
            self.text((self._left - 5, self.at(0, value)[1]), number, "muted", "end")
        self.text((_FONT, (self._top + self._bottom) / 2), label, "muted", "middle", turn=-90)

    def render(self) -> str:
        return tostring(self._svg, encoding="unicode")


def draw_speeds(groups: Sequence[Group]) -> str:
    """Tokens/s of each arm: the median over prompts as a bar, the quartiles as a line."""
    drawn = [group for group in groups if group.tokens_per_second]
    limit = max(group.tokens_per_second[2] for group in drawn) * 1.14
    plot = _row_plot("Tokens per second by arm", [group.arm for group in drawn], _BAR_ROW, (0, limit), "tokens/s")
    for row, group in enumerate(drawn):
        low, middle, high = group.tokens_per_second
        plot.bar(middle, row, {PLAIN: "muted", AUTOPILOT: "accent"}.get(group.arm, "neutral"))
        plot.line([(low, row), (high, row)], "ink", 1.4)
        x, y = plot.at(high, row)
        plot.text((x + 5, y), f"{middle:.1f}", "ink")
    return plot.render()


def draw_speedups(points: Iterable[Point]) -> str:
    """The ratio of every point to plain decoding, in a row for each category."""
    ratios: dict[str, list[float]] = {}
    for point in points:
        if point.ratio is not None:
            ratios.setdefault(point.category, []).append(point.ratio)
    everything = [1.0, *(ratio for values in ratios.values() for ratio in values)]
    margin = 0.05 * (max(everything) - min(everything)) or 0.05
    span = (min(everything) - margin, max(everything) + margin)
    title = "The autopilot's speedup by category"
    plot = _row_plot(title, list(ratios), _DOT_ROW, span, "tokens/s, autopilot / plain")
    plot.line([(1.0, -0.5), (1.0, len(ratios) - 0.5)], "muted", 1.2, dash="4 3")
    for row, values in enumerate(ratios.values()):
        offsets = np.random.default_rng(0).uniform(-0.26, 0.26, len(values)) * (len(values) > 1)
        for ratio, offset in zip(values, offsets.tolist(), strict=True):
            plot.dot(ratio, row + offset, "accent")
        plot.line([(median(values), row - 0.36), (median(values), row + 0.36)], "ink", 2)
    return plot.render()


def draw_acceptance(summary: Summary) -> str:
    """Acceptance by depth, a line for each drafter that drafted."""
    lines = {name: (range(1, len(alpha) + 1), alpha) for name, alpha in summary.alpha_by_drafter.items() if alpha}
    labels = ("depth in the draft", "accepted / tested")
    return _line_plot("Acceptance by depth", lines, labels, 1.03)


def draw_costs(curves: Sequence[Cost]) -> str:
    """v(m) = T(m) / T(1), a line for each position."""
    lines = {
        f"position {cost.position}": (sorted(cost.rows), [cost.rows[m] / cost.rows[1] for m in sorted(cost.rows)])
        for cost in curves
    }
    limit = max(value for _, values in lines.values() for value in values) * 1.05
    return _line_plot(
        "Cost of a forward by its rows", lines, ("rows m of a target forward", "v(m) = T(m) / T(1)"), limit
    )


def _row_plot(title: str, names: Sequence[str], row_height: float, x: Span, label: str) -> Plot:
    """A plot with a named row for each of `names`, the first on top."""
    shown = [_shorten(name) for name in names]
    left = 8 + max(map(_text_width, shown))
    plot = Plot(title, _TOP + _BOTTOM + row_height * len(names), left, x, (len(names) - 0.5, -0.5))
    plot.x_axis(label)
    for row, name in enumerate(shown):
        plot.text((left - 6, plot.at(0, row)[1]), name, "ink", "end")
    return plot


def _line_plot(
    title: str, lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], labels: tuple[str, str], limit: float
) -> str:
    """Series over whole numbers from 1, under a legend; the y axis goes from 0 to `limit`."""
    legend = {name: _shorten(name) for name in lines}
    widths = [20 + _text_width(text) for text in legend.values()]
    places: list[Span] = []
    x, y = 48.0, _TOP + 6
    for width in widths:
        if places and x + width > _WIDTH:
            x, y = 48.0, y + 15
        places.append((x, y))
        x += width
    depth = max(max(xs) for xs, _ in lines.values())
    plot = Plot(title, _HEIGHT + y, 44, (0.5, depth + 0.5), (0, limit), top=y + 14)
    plot.x_axis(labels[0], integers=True)
    plot.y_axis(labels[1])
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        color = "accent" if name == AUTOPILOT else _SERIES[i % len(_SERIES)]
        shape = _MARKERS[i % len(_MARKERS)]
        points = list(zip(xs, ys, strict=True))
        plot.line(points, color, 1.7)
        for place in (*(plot.at(*point) for point in points), places[i]):
            plot.marker(place, shape, color)
        plot.text((places[i][0] + 7, places[i][1]), legend[name], "ink")
    return plot.render()


def _choose_ticks(low: float, high: float, *, integers: bool = False) -> list[tuple[float, str]]:
    """About six round numbers from `low` to `high`, either of which may be the smaller, and their text."""
    low, high = min(low, high), max(low, high)
    magnitude = 10 ** math.floor(math.log10((high - low) / 6))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= (high - low) / 6)
    if integers:
        step = max(1, round(step))
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(n * step, f"{n * step:.{decimals}f}") for n in range(first, last + 1)]


def _shorten(name: str) -> str:
    name = make_printable(name)
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def _text_width(text: str) -> float:
    """An estimate, in user units; the page's font is not known here."""
    return sum(_FONT if unicodedata.east_asian_width(c) in "WF" else 0.58 * _FONT for c in text)
