"""Charts are well-formed SVG that loads nothing, and values lie where they belong."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from local_runner.plots import Chart, _ceiling, _ticks, bar_chart, line_chart, page, reliability_diagram

SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(page([chart]))


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def test_a_page_is_one_svg_for_both_themes_that_loads_nothing() -> None:
    chart = bar_chart('a < b & "c"', {"x": 1.0}, "τ")
    svg = page([chart, chart, chart], columns=2)
    root = ElementTree.fromstring(svg)
    assert [float(n) for n in root.get("viewBox", "").split()] == [0, 0, 2 * chart.width, 2 * chart.height]
    assert "prefers-color-scheme:dark" in svg and "a &lt; b &amp;" in svg
    assert not re.search(r"href|url\(|@import|<script|<image", svg)
    assert ElementTree.fromstring(page([])) is not None


def test_bars_end_at_their_values_with_whiskers() -> None:
    root = drawn(bar_chart("t", {"a": 1.0, "b": 2.0, "none": None}, "τ", {"b": (1.5, 2.5)}))
    widths = [float(r.get("width", "0")) for r in root.iter(f"{SVG}rect") if r.get("class") == "f0"]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2) and len(widths) == 2
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"a", "b", "none", "1.00", "2.00"} <= set(texts)
    (whisker,) = [p.get("d", "") for p in root.iter(f"{SVG}path") if p.get("class") == "ink"]
    low, high = float(whisker[1:].split()[0]), float(whisker.split("H")[1].split("M")[0])
    start = min(float(r.get("x", "0")) for r in root.iter(f"{SVG}rect") if r.get("class") == "f0")
    assert (low - start) / widths[0] == pytest.approx(1.5, abs=0.01)
    assert (high - start) / widths[0] == pytest.approx(2.5, abs=0.01)


def test_lines_rise_to_the_right_and_break_at_gaps() -> None:
    root = drawn(line_chart("t", {"a": [(1, 0.0), (2, 0.5), (3, None), (4, 1.0)], "b": [(1, 0.2)]}, "x", "y", (0, 1)))
    lines = {p.get("class"): p.get("d", "") for p in root.iter(f"{SVG}path") if (p.get("class") or "").startswith("s")}
    a = points(lines["s0"])
    assert [x for x, _ in a] == sorted(x for x, _ in a) and [y for _, y in a] == sorted((y for _, y in a), reverse=True)
    assert (a[0][1] + a[2][1]) / 2 == pytest.approx(a[1][1], abs=0.2)
    assert lines["s0"].count("M") == 2, "the gap lifts the pen"
    assert {"a", "b"} <= {t.text for t in root.iter(f"{SVG}text")}, "two series have a legend"


def test_a_calibrated_head_lies_on_the_diagonal() -> None:
    root = drawn(reliability_diagram("t", {"x": ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0], [4, 1, 0])}))
    circles = [
        (float(c.get("cx", "")), float(c.get("cy", "")), float(c.get("r", ""))) for c in root.iter(f"{SVG}circle")
    ]
    (x0, y0, r0), (x1, y1, r1), (x2, y2, _) = circles
    assert (x0 + x2) / 2 == pytest.approx(x1, abs=0.1) and (y0 + y2) / 2 == pytest.approx(y1, abs=0.1)
    assert x0 < x2 and y0 > y2 and r0 == pytest.approx(2 * r1, abs=0.1), "area is the share"


@given(st.floats(1e-6, 1e9))
def test_axes_end_at_a_round_number_above_the_values(value: float) -> None:
    top = _ceiling(value)
    assert value <= top * (1 + 1e-6) and top <= 2.1 * value
    ticks = _ticks(0.0, top)
    assert 3 <= len(ticks) <= 13 and ticks[0] == 0.0


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(1.0, None)]}, {"a": [(1.0, 0.0)]}])
def test_little_or_nothing_can_be_drawn(series: dict[str, list[tuple[float, float | None]]]) -> None:
    drawn(line_chart("t", series, "x", "y"))
    drawn(bar_chart("t", {name: None for name in series}, "x"))
    drawn(reliability_diagram("t", {name: ([], [], []) for name in series}))
