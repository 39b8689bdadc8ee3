import io
import re
import threading
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from local_runner import watch
from local_runner.board import Board
from local_runner.engine import Decoding
from local_runner.identity import judge
from local_runner.prompts import Prompt
from local_runner.race import Watcher, race
from local_runner.result import race_result
from local_runner.watch import LineWatcher, LiveWatcher, fits, picture
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

DECODING = Decoding(60, SamplingParams(), Fixed())
PROMPTS = [Prompt("a", "chat", ("one",)), Prompt("b", "code", ("two",))]


def follow(engine: Any, watcher: Watcher) -> Any:
    runs = race(engine, PROMPTS, DECODING, repeats=1, watcher=watcher, cancelled=threading.Event())
    return race_result(engine, "a-pair", runs, judge(engine, runs, DECODING), DECODING)


def test_one_plain_line_for_every_prompt(fake: ModuleType) -> None:
    lines: list[str] = []
    follow(fake.FakeEngine(), LineWatcher(Board(fake.FakeEngine(), ""), lines.append))
    assert len(lines) == 2
    assert re.fullmatch(r"\[1/2\] a: plain 50\.0 tok/s, DSpark \d+\.\d tok/s, τ 3\.\d+, 2\.\d+×", lines[0])


def test_the_live_view_draws_between_rounds_and_not_at_every_one(
    fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that advances by 10 ms at every round, a drawing that takes no time happens every tenth round."""
    now = [0.0]
    monkeypatch.setattr(watch, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    engine = fake.FakeEngine()
    with LiveWatcher(Board(engine, ""), console) as watcher:
        drawn: list[float] = []
        monkeypatch.setattr(watcher._live, "update", lambda view, refresh: drawn.append(now[0]))

        class Clocked:
            begin, end = watcher.begin, watcher.end

            @staticmethod
            def round(heat: Any, round_: Any) -> None:
                now[0] += 0.01
                watcher.round(heat, round_)

        follow(engine, Clocked())
    rounds = round(now[0] / 0.01)
    assert rounds > 100
    assert rounds / 10 - 4 <= len(drawn) - 8 <= rounds / 10, "beside two drawings for each of four heats"


def test_a_slow_terminal_gets_few_drawings(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch, "monotonic", lambda: now[0])
    watcher = LiveWatcher(Board(fake.FakeEngine(), ""), Console(file=io.StringIO(), force_terminal=True))

    def slow(view: Any, refresh: bool) -> None:
        now[0] += 0.03

    monkeypatch.setattr(watcher._live, "update", slow)
    watcher._draw()
    assert watcher._due == pytest.approx(0.03 + 0.03 / watch.DRAWING_SHARE)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_that_is_called_a_terminal_gets_no_live_view() -> None:
    assert not fits(Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"}))


@pytest.mark.parametrize(
    ("terminal", "width", "height", "expected"),
    [(True, 80, 24, True), (False, 80, 24, False), (True, 60, 24, False), (True, 80, 12, False)],
)
def test_where_the_live_view_fits(terminal: bool, width: int, height: int, expected: bool) -> None:
    console = Console(file=Screen(), force_terminal=terminal, width=width, height=height, _environ={"TERM": "xterm"})
    assert fits(console) is expected


def test_the_picture_loads_nothing_from_elsewhere(fake: ModuleType) -> None:
    engine = fake.FakeEngine()
    board = Board(engine, "a pair")
    svg = picture(board, follow(engine, LineWatcher(board, lambda line: None)))
    urls = re.findall(r"https?://[^\"' )]+", svg)
    assert urls == ["http://www.w3.org/2000/svg"], "the name of the SVG language is the only address"
    assert "@font-face" not in svg and "url(" not in re.sub(r"url\(#[\w-]+\)", "", svg)
    for words in ("DSpark", "speed-up", "text-decoration: underline", "Identical"):
        assert words in svg.replace("&#160;", " ")
