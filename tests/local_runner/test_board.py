import io
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from local_runner.board import ACCEPTED, BONUS, FRAME, GHOST, Board, Pane, bar, printable, verdicts
from local_runner.engine import Decoding, Mode
from local_runner.prompts import read_prompts
from local_runner.race import Heat
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

DECODING = Decoding(120, SamplingParams(), Fixed())


def played(engine: Any, stop_after: int | None = None) -> Board:
    """A board on which plain has finished and DSpark has, or is in the middle of its answer."""
    board = Board(engine, "a pair with a long name · bfloat16 · cpu · 2 threads")
    modes: tuple[Mode, Mode] = ("plain", "dspark")
    for mode in modes:
        heat = Heat(read_prompts()[10], 10, 30, 0, 0, mode, (4,))
        board.begin(heat)
        for number, round_ in enumerate(engine.generate(DECODING.request(engine, (4,), mode, "x"))):
            board.round(heat, round_)
            if mode == "dspark" and number == stop_after:
                return board
        board.end(mode)
    return board


def drawn(board: Board, width: int, height: int) -> list[str]:
    console = Console(
        width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None, record=True
    )
    console.print(board.render(console, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("block", [1, 4, 7, 16])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 30), (200, 50), (72, 20)])
def test_the_board_fills_its_size_exactly(fake: ModuleType, width: int, height: int, block: int) -> None:
    engine = fake.FakeEngine()
    engine.block = block
    lines = drawn(played(engine, stop_after=9), width, height)
    assert len(lines) == height
    assert max(Text(line).cell_len for line in lines) <= width
    panes = lines[2 : height - FRAME + 2]
    assert all(Text(line).cell_len == width for line in panes), "both panes fill the width"
    assert panes[0].startswith("╭─ plain  50.0 tok/s") and "DSpark" in panes[0] and panes[-1].endswith("╯")
    assert "120 tokens" in panes[-1] and "τ 3." in panes[-1]
    assert "prompt 11 of 30 · code" in lines[0]
    assert "█" in lines[height - 6] + lines[height - 4]


def test_the_end_of_a_long_answer_is_what_is_shown(fake: ModuleType) -> None:
    lines = "\n".join(drawn(played(fake.FakeEngine()), 80, 20))
    assert "turns slowly" in lines and lines.count("def beam") < 2 * 3


def round_(drafted: list[int], scheduled: int, accepted: int, next_token: int, stop: str | None = None) -> Round:
    committed = (*drafted[:accepted], next_token)
    return Round("x", 1, 0, 0, tuple(drafted), (), scheduled, accepted, next_token, committed, stop, 0.01, 0.02)


def spans(text: Text) -> list[tuple[str, str]]:
    return [(text.plain[s.start : s.end], str(s.style)) for s in text.spans if s.start < s.end]


def test_origin_is_marked_by_more_than_colour(fake: ModuleType) -> None:
    pane = Pane(fake.FakeEngine())
    pane.running = True
    pane.add(round_([0, 1, fake.WRONG, 3], 4, 2, 2))
    assert spans(pane.text()) == [("The lamp", ACCEPTED), ("·wrong slowly", GHOST)]
    assert pane.text().plain == "The lamp turns·wrong slowly"
    pane.add(round_([3, 4], 2, 2, 5))
    assert spans(pane.text()) == [("The lamp", ACCEPTED), (" slowly and", ACCEPTED), ("▸", BONUS), (" the", BONUS)]
    pane.add(round_([6, 7, 8, 9], 0, 0, 6))
    assert spans(pane.text())[4:] == [], "what was not verified is no ghost, and a lone token no bonus"
    assert "underline" in ACCEPTED and "strike" in GHOST


def test_the_ghost_goes_when_the_answer_ends(fake: ModuleType) -> None:
    pane = Pane(fake.FakeEngine())
    pane.running = True
    pane.add(round_([fake.WRONG], 1, 0, 0))
    assert "wrong" in pane.text().plain
    pane.running = False
    assert pane.text().plain == "The"


def test_survival_bars_count_scheduled_positions(fake: ModuleType) -> None:
    board = Board(fake.FakeEngine(), "")
    heat = Heat(read_prompts()[0], 0, 1, 0, 0, "dspark", (1,))
    board.begin(heat)
    board.round(heat, round_([0, 1, 2, 3], 4, 1, 9))
    board.round(heat, round_([0, 1, 2, 3], 2, 2, 9))
    labels = drawn(board, 80, 24)[-3].split()
    assert labels[:4] == ["100%", "50%", "0%", "0%"]


def test_bars() -> None:
    assert bar(0, 3) == [" ", " ", " "]
    assert bar(1, 3) == ["█", "█", "█"]
    assert bar(0.5, 3) == [" ", "▄", "█"]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9b\tc\n\u200dé🌊") == "a�[2Jb���\tc\n\u200dé🌊"


def test_markup_in_an_answer_is_text(fake: ModuleType) -> None:
    assert any("[bold]" in line for line in drawn(played(fake.FakeEngine()), 120, 30))


@pytest.mark.parametrize(("speedup", "says"), [(1.5, "1.50× as fast"), (0.61, "SLOWER"), (None, "Nothing to compare")])
def test_who_is_faster_is_said_plainly(speedup: float | None, says: str) -> None:
    assert says in verdicts({"speedup": speedup, "identity": {"sentence": ""}})[0]
