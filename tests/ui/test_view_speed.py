"""The page keeps up: 2,000 tokens in each lane at 200 tokens a second, from the feeding of a round to its paint."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from ui.messages import LANES, run_message

TOKENS = 2000
TOKENS_PER_S = 200
MOST_MS = 100
QUARTERS = 4
MOST_GROWTH = 1.5
TRIES = 3
"""Other work on the machine can only make waits longer, so the best of a few tries is the page's own."""
LINES = ["The ", "sea ", "keeps ", "its ", "own ", "time", ",", " and ", "so ", "do ", "we", ".\n"]
PARAGRAPHS = [*(word.rstrip("\n") + " " for word in LINES * 12), ".\n\n"]

# Feeds each lane's rounds when they are due. A round is painted when the task after the view's next frame runs.
FEED = """
const [lanes, done] = arguments;
const start = performance.now(), waits = [], pending = [];
const frame = view.frame;
let left = lanes[0].length + lanes[1].length;
view.frame = (time) => {
  frame(time);
  const shown = pending.splice(0);
  setTimeout(() => {
    for (const fed of shown) waits.push(performance.now() - fed);
    left -= shown.length;
    if (!left) { left = -1; view.frame = frame; done(waits); }
  });
};
for (const lane of lanes) {
  let at = 0;
  const next = () => {
    const now = performance.now(), due = [];
    while (at < lane.length && lane[at].at_ms <= now - start) due.push(lane[at++].message);
    view.feed(due);
    for (const _ of due) pending.push(now);
    if (at < lane.length) setTimeout(next, lane[at].at_ms - (performance.now() - start));
  };
  next();
}
"""


def used(chrome: Any) -> dict[str, float]:
    """Seconds of processor time of the page's main thread, and layouts, so far."""
    return {m["name"]: m["value"] for m in chrome.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}


def quarters(rounds_of: Any, lane_of: Any, prose: list[str]) -> list[list[list[dict[str, Any]]]]:
    """[quarter][lane][round]: messages with the milliseconds at which they are due in their quarter."""
    made: list[list[list[dict[str, Any]]]] = [[[], []] for _ in range(QUARTERS)]
    each = TOKENS / QUARTERS
    for at, lane in enumerate(LANES):
        tokens = 0
        pieces = [prose[i % len(prose)] for i in range(TOKENS)]
        for message in lane_of(lane, rounds_of(lane, TOKENS), pieces)[1:-1]:
            quarter = min(int(tokens / each), QUARTERS - 1)
            tokens += len(message["pieces"])
            made[quarter][at].append({"at_ms": 1000 * (tokens - quarter * each) / TOKENS_PER_S, "message": message})
    return made


def measure(chrome: Any, parts: list[list[list[dict[str, Any]]]]) -> dict[str, float]:
    chrome.execute_script("view.reset(); view.feed([arguments[0]])", run_message(block=7, max_new_tokens=TOKENS))
    waits: list[list[float]] = []
    frame_ms = []
    busy_s = 0.0
    for lanes in parts:
        before = used(chrome)
        waits.append(chrome.execute_async_script(FEED, lanes))
        after = used(chrome)
        spent = after["ThreadTime"] - before["ThreadTime"]
        busy_s += spent
        frame_ms.append(1000 * spent / (after["LayoutCount"] - before["LayoutCount"]))
    assert [len(w) for w in waits] == [sum(len(lane) for lane in lanes) for lanes in parts]
    for lane in LANES:
        assert chrome.execute_script("return view.lanes[arguments[0]].tally.tokens", lane) == TOKENS
    every = [ms for quarter in waits for ms in quarter]
    return {
        "p95_ms": quantiles(every, n=20)[-1],
        "median_ms": median(every),
        "worst_ms": max(every),
        "first_quarter_median_ms": median(waits[0]),
        "last_quarter_median_ms": median(waits[-1]),
        "main_thread_share": busy_s / (TOKENS / TOKENS_PER_S),
        "second_quarter_frame_ms": frame_ms[1],
        "last_quarter_frame_ms": frame_ms[-1],
    }


def growth(found: dict[str, float]) -> float:
    """How much slower the page became. A frame's own cost counts from the second quarter on, when lanes are full."""
    waited = found["last_quarter_median_ms"] / found["first_quarter_median_ms"]
    return max(waited, found["last_quarter_frame_ms"] / found["second_quarter_frame_ms"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lines", "paragraphs"])
def test_2000_tokens_at_200_a_second(open_view: Callable[..., Any], rounds_of: Any, lane_of: Any, name: str) -> None:
    chrome = open_view()
    chrome.execute_cdp_cmd("Performance.enable", {})
    chrome.set_script_timeout(60)
    parts = quarters(rounds_of, lane_of, LINES if name == "lines" else PARAGRAPHS)
    for _ in range(TRIES):
        found = measure(chrome, parts)
        if found["p95_ms"] <= MOST_MS and growth(found) <= MOST_GROWTH:
            break
    if folder := os.environ.get("DSPARK_RESULTS"):
        stored = {"tokens_per_lane": TOKENS, "tokens_per_s": TOKENS_PER_S, **{k: round(v, 3) for k, v in found.items()}}
        Path(folder, f"view_speed_{name}.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    assert found["p95_ms"] <= MOST_MS
    assert growth(found) <= MOST_GROWTH, "a frame costs more the longer the answer is"
    assert found["main_thread_share"] < 0.5
