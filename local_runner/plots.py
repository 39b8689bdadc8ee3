"""Charts as SVG that loads nothing from anywhere and is readable on light and dark pages.

Each function draws one `Chart`; `page` puts charts beside and below each other in one picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

Points = Sequence[tuple[float, float | None]]
Range = tuple[float, float]

WIDTH, PLOT = 460, 230
"""The width of a chart, and the height of its plot, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 40, 44
ROW = 26
LETTER = 6.6
"""About how wide a letter is: the text is not measured, only kept from running into other text."""
COLOURS = ("#0b65c2", "#c2520b", "#0a7d58", "#9a3fa0", "#8a6d00", "#007a8a", "#b3304a", "#5b6470")
ON_DARK = ("#6cb2ff", "#ff9d57", "#45d1a0", "#e08be6", "#e0bf3d", "#4fd0e0", "#ff8599", "#a9b3bf")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Series differ by more than colour."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn, and its size in pixels."""

    body: str
    width: float
    height: float


def page(charts: Sequence[Chart], columns: int = 2) -> str:
    """One SVG with the charts from left to right, `columns` in a row."""
    drawn, y, width = [], 0.0, 0.0
    for start in range(0, len(charts), columns):
        row, x = charts[start : start + columns], 0.0
        for chart in row:
            drawn.append(f'<g transform="translate({x:g} {y:g})">{chart.body}</g>')
            x += chart.width
        width, y = max(width, x), y + max(c.height for c in row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" height="{y:g}"'
        f' font-family="system-ui, sans-serif" font-size="12"><style>{_style()}</style>'
        f'<rect class="page" width="100%" height="100%"/>{"".join(drawn)}</svg>\n'
    )


def line_chart(title: str, series: Mapping[str, Points], x_label: str, y_label: str, y: Range | None = None) -> Chart:
    """Lines through the points (x, y) of each series, by name; a point without y breaks its line. `y` is the range of
    the axis, by default from 0 to what there is.
    """
    xs = [point[0] for points in series.values() for point in points]
    ys = [v for points in series.values() for _, v in points if v is not None]
    axes = _Axes((min(xs, default=0.0), max(xs, default=1.0)), y or (0.0, _ceiling(max(ys, default=1.0))))
    marks = [_line(axes, points, index) for index, points in enumerate(series.values())]
    return _framed(title, axes, x_label, y_label, marks, list(series))


def reliability_diagram(
    title: str, series: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[int]]]
) -> Chart:
    """Predicted against observed shares of each series: (predicted, observed, counts) of its bins.

    The area of a dot is its bin's share of the predictions; on the diagonal predictions come true.
    """
    axes = _Axes((0.0, 1.0), (0.0, 1.0))
    marks = [f'<path class="ink" opacity=".4" stroke-dasharray="4 4" d="M{axes.at(0, 0)}L{axes.at(1, 1)}"/>']
    for index, (predicted, observed, counts) in enumerate(series.values()):
        total = sum(counts) or 1
        marks.append(_line(axes, list(zip(predicted, observed, strict=True)), index, dots=False))
        for p, o, n in zip(predicted, observed, counts, strict=True):
            radius = max(1.5, 14 * math.sqrt(n / total))
            cx, cy = axes.at(p, o).split()
            marks.append(f'<circle class="f{index % 8}" fill-opacity=".55" cx="{cx}" cy="{cy}" r="{radius:.1f}"/>')
    return _framed(title, axes, "predicted", "observed", marks, list(series))


def bar_chart(
    title: str, values: Mapping[str, float | None], x_label: str, intervals: Mapping[str, Range | None] | None = None
) -> Chart:
    """A bar from 0 for each value, by name, with its number and, where there is one, its interval as a whisker."""
    spans = {name: (intervals or {}).get(name) for name in values}
    most = max([v for v in values.values() if v is not None] + [s[1] for s in spans.values() if s], default=1.0)
    left = min(WIDTH / 2, 24 + LETTER * max(map(len, values), default=0))
    axes = _Axes((0.0, _ceiling(most)), (0.0, 1.0), left=left, height=ROW * len(values), right=54)
    marks = []
    for row, (name, value) in enumerate(values.items()):
        middle = TOP + ROW * (row + 0.5)
        marks.append(_text(left - 8, middle + 4, name, "end"))
        if value is None:
            continue
        end = axes.x(value)
        marks.append(f'<rect class="f0" x="{left:g}" y="{middle - 8:g}" width="{end - left:.1f}" height="16" rx="2"/>')
        if span := spans[name]:
            low, high = axes.x(span[0]), axes.x(span[1])
            whisker = f"M{low:.1f} {middle:g}H{high:.1f}M{low:.1f} {middle - 4:g}v8M{high:.1f} {middle - 4:g}v8"
            marks.append(f'<path class="ink" d="{whisker}"/>')
            end = max(end, high)
        marks.append(_text(end + 6, middle + 4, f"{value:.2f}", "start"))
    return _framed(title, axes, x_label, "", marks, [])


class _Axes:
    """Where values lie in a chart."""

    def __init__(self, x: Range, y: Range, *, left: float = LEFT, right: float = RIGHT, height: float = PLOT) -> None:
        self.x_range, self.y_range = (x if x[0] < x[1] else (x[0] - 0.5, x[0] + 0.5)), y
        self.left, self.width, self.height = left, WIDTH - left - right, height

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + self.width * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return TOP + self.height * (1 - (value - low) / (high - low))

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f} {self.y(y):.1f}"


def _line(axes: _Axes, points: Points, index: int, dots: bool = True) -> str:
    path, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        path.append(f"{pen}{axes.at(x, y)}")
        pen = "L"
        if dots:
            path.append("m-1 0h2m-1 0")  # a point between two gaps is seen too
    return f'<path class="s{index % 8}" stroke-dasharray="{DASHES[index % 4]}" d="{"".join(path)}"/>'


def _framed(title: str, axes: _Axes, x_label: str, y_label: str, marks: Sequence[str], legend: Sequence[str]) -> Chart:
    bottom, right = TOP + axes.height, axes.left + axes.width
    parts = [_text(12, 22, title, "start", "title")]
    for tick in _ticks(*axes.x_range):
        parts.append(f'<path class="grid" d="M{axes.x(tick):.1f} {TOP}V{bottom:g}"/>')
        parts.append(_text(axes.x(tick), bottom + 16, f"{tick:g}", "middle", "soft"))
    if y_label:
        for tick in _ticks(*axes.y_range):
            parts.append(f'<path class="grid" d="M{axes.left:g} {axes.y(tick):.1f}H{right:g}"/>')
            parts.append(_text(axes.left - 7, axes.y(tick) + 4, f"{tick:g}", "end", "soft"))
        turned = f'transform="rotate(-90 16 {TOP + axes.height / 2:g})"'
        parts.append(_text(16, TOP + axes.height / 2, y_label, "middle", "soft", turned))
    parts.append(_text((axes.left + right) / 2, bottom + 34, x_label, "middle", "soft"))
    x, y = axes.left, bottom + BOTTOM + 10
    for index, name in enumerate(legend if len(legend) > 1 else []):
        wide = 34 + LETTER * len(name)
        if x > axes.left and x + wide > WIDTH:
            x, y = axes.left, y + 18
        key = f'<path class="s{index % 8}" stroke-dasharray="{DASHES[index % 4]}" d="M{x:g} {y - 4:g}h20"/>'
        parts += [key, _text(x + 25, y, name, "start")]
        x += wide + 10
    return Chart("".join([*parts, *marks]), WIDTH, (y if len(legend) > 1 else bottom + BOTTOM) + 12)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.99)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _ceiling(value: float) -> float:
    """A round number from `value` on; 1 for 0."""
    if value <= 0:
        return 1.0
    ticks = _ticks(0.0, value)
    step = next(b - a for a, b in pairwise(ticks))
    return math.ceil(round(value / step, 9)) * step


def _text(x: float, y: float, text: str, anchor: str, kind: str = "", more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _style() -> str:
    def theme(page: str, ink: str, soft: str, grid: str, colours: Sequence[str]) -> str:
        series = "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colours))
        basics = f".page{{fill:{page}}}text{{fill:{ink}}}.ink{{stroke:{ink}}}text.soft{{fill:{soft}}}"
        return f"{basics}.grid{{stroke:{grid}}}{series}"

    light = theme("#ffffff", "#1c2024", "#57606a", "#d8dee4", COLOURS)
    dark = theme("#14171c", "#e8eaed", "#a2abb5", "#363d47", ON_DARK)
    return (
        f"path{{fill:none;stroke-width:2;stroke-linejoin:round}}path.grid{{stroke-width:1}}path.ink{{stroke-width:1.5}}"
        f".title{{font-weight:600}}{light}@media (prefers-color-scheme:dark){{{dark}}}"
    )
