"""A headless browser for all tests of the page, and races that were never run for it to show."""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.decoding.rounds import Round
from sglang_dspark.errors import InputError
from ui import view
from ui.messages import LANES, LaneWriter, Message, run_message, state_message
from ui.picture import chromium, media, resize
from ui.recording import compare

TEXT = (
    "The lighthouse keeper counts the waves, because counting keeps the night short.\n\n"
    "등대지기는 파도를 셉니다. 灯台守は波を数える。\n\nحارس المنارة يعد الأمواج.\n\n"
    "```python\ndef beam(angle):\n    return angle % 360  # 👩‍🚀 🇰🇷\n```\nAnd `then` it goes on, <b>bold</b> & all.\n"
)
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A race</title>
<meta name="viewport" content="width=device-width"><style>body {{ margin: 0 }} {css}</style></head>
<body><main><h1 hidden>A race</h1><div id="stage"></div></main><script>{script}</script></body></html>"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for the session; tests take `chrome`."""
    if os.environ.get("DSPARK_NO_BROWSER") == "1":
        pytest.skip("DSPARK_NO_BROWSER=1 leaves the browser tests out")
    try:
        with chromium() as chrome:
            yield chrome
    except InputError as error:
        # A person without a browser still gets the other tests; CI must not miss these without a word.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


@pytest.fixture
def chrome(browser: Any) -> Iterator[Any]:
    """A browser with nothing on its page, 1280 by 900, light, in motion; its scripts must not have failed."""
    resize(browser, 1280, 900)
    media(browser, prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    yield browser
    assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]


@pytest.fixture
def open_view(chrome: Any, tmp_path: Path) -> Callable[..., Any]:
    """Mounts a view on an empty page as `view`, with options, and feeds it; returns the browser."""

    def open_(messages: Sequence[Message] = (), **options: Any) -> Any:
        page = tmp_path / "view.html"
        page.write_text(PAGE.format(css=view.css(), script=view.script()), encoding="utf-8")
        chrome.get(page.as_uri())
        chrome.execute_script(
            "window.view = DSparkView.mount(document.getElementById('stage'), arguments[0]); view.feed(arguments[1])",
            {"language": "en", **options},
            list(messages),
        )
        return chrome

    return open_


@pytest.fixture(scope="session")
def axe() -> Callable[[Any], list[str]]:
    """Runs axe-core on the page that is open; returns its serious and critical findings."""
    spec = find_spec("axe_core_python")
    assert spec is not None and spec.origin is not None, "axe-core is not installed; install the extra 'dev'"
    source = (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")

    def run(chrome: Any) -> list[str]:
        chrome.execute_script(source)
        found = chrome.execute_async_script("axe.run().then((r) => arguments[0](r.violations))")
        return [
            f"{v['id']}: {n['html'][:200]} {n.get('failureSummary', '')}"
            for v in found
            if v["impact"] in ("serious", "critical")
            for n in v["nodes"]
        ]

    return run


class Letters:
    """A detokeniser of tokens that are indices into `pieces`."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, tokens: Sequence[int]) -> str:
        return "".join(self.pieces[t % len(self.pieces)] for t in tokens)


def make_rounds(lane: str, count: int, seed: int = 7, step_s: float = 0.02) -> list[Round]:
    """Rounds that commit tokens 0 … count - 1; DSpark drafts seven, of which any number are verified and accepted."""
    draw = random.Random(seed)
    rounds = [Round(lane, 0, 20, 1, (), (), 0, 0, 0, (0,), None, 0.0, 5 * step_s)]
    at = 1
    while at < count:
        drafted: tuple[int, ...] = ()
        confidence: tuple[float, ...] = ()
        scheduled = accepted = 0
        if lane == "dspark":
            scheduled = draw.randint(0, 7)
            accepted = min(draw.randint(0, scheduled), count - at - 1)
            drafted = tuple(at + k if k < accepted else at + k + 3 for k in range(7))
            confidence = tuple(round(draw.random(), 4) for _ in drafted)
        committed = (*drafted[:accepted], at + accepted)
        draft_s = step_s * 0.3 * draw.uniform(0.9, 1.1) if drafted else 0.0
        stop = "length" if at + len(committed) >= count else None
        values = (
            lane,
            len(rounds),
            20 + at,
            at - 1,
            drafted,
            confidence,
            scheduled,
            accepted,
            committed[-1],
            committed,
        )
        rounds.append(Round(*values, stop, draft_s, step_s * draw.uniform(0.95, 1.05)))
        at += len(committed)
    return rounds


def lane_messages(lane: Any, rounds: Sequence[Round], pieces: Sequence[str]) -> list[Message]:
    """A lane of a recording."""
    writer = LaneWriter(lane, Letters(pieces), Letters(pieces).push)
    made = [writer.message(r) for r in rounds]
    return [state_message("running", lane=lane), *made, state_message("finished", lane=lane)]


def make_race(pieces: Sequence[str] | None = None, count: int | None = None, **run: Any) -> list[Message]:
    """A whole recording, whose lanes commit `count` tokens with the texts `pieces`."""
    pieces = pieces or [TEXT[i : i + 3] for i in range(0, len(TEXT), 3)]
    count = count or len(pieces)
    rounds = {lane: make_rounds(lane, count) for lane in LANES}
    memory = [
        {"part": "target", "bytes": 269_000_000, "pool": "host"},
        {"part": "caches", "bytes": 9_000_000, "pool": None},
    ]
    known = {"id": "r", "prompt": "Tell me of the sea.", "pair": "made-up", "block": 7, "memory": memory, **run}
    messages = [run_message(**known)]
    for lane in LANES:
        messages += lane_messages(lane, rounds[lane], pieces)
    return [*messages, compare(rounds["plain"], rounds["dspark"], "Because it is so."), state_message("finished")]


@pytest.fixture(scope="session")
def race_of() -> Callable[..., list[Message]]:
    """`make_race`, which other files cannot import."""
    return make_race


@pytest.fixture(scope="session")
def rounds_of() -> Callable[..., list[Round]]:
    """`make_rounds`."""
    return make_rounds


@pytest.fixture(scope="session")
def lane_of() -> Callable[..., list[Message]]:
    """`lane_messages`."""
    return lane_messages


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A recording on disk."""
    path = tmp_path / "race.jsonl"
    path.write_text("".join(json.dumps(m, ensure_ascii=False) + "\n" for m in make_race()), encoding="utf-8")
    return path
