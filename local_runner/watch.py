"""Following a race: live in a terminal, as lines elsewhere, and as a picture at the end."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from local_runner.board import Board, summary, verdicts
from local_runner.race import Heat, Run
from sglang_dspark.decoding.rounds import Round, summarise

REFRESH_S = 0.1
DRAWING_SHARE = 0.05
"""Drawing takes at most this share of the wall clock, and nothing of the time that is measured."""
SMALLEST = (72, 20)
"""Columns and lines below which a live view would be crowded; lines are printed instead."""
PICTURE = (100, 26)


class LiveWatcher:
    """Draws the board on the whole screen, at most ten times a second, and only between rounds."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board = board
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._due = 0.0

    def __enter__(self) -> LiveWatcher:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def begin(self, heat: Heat) -> None:
        """Show the new heat at once."""
        self._board.begin(heat)
        self._draw()

    def round(self, heat: Heat, round_: Round) -> None:
        """Take in the round, and draw if it is time to."""
        self._board.round(heat, round_)
        if monotonic() >= self._due:
            self._draw()

    def end(self, run: Run) -> None:
        """Show the finished heat at once."""
        self._board.end(run.heat.mode)
        self._draw()

    def _draw(self) -> None:
        started = monotonic()
        width, height = self._console.size
        self._live.update(self._board.render(self._console, width, height), refresh=True)
        ended = monotonic()
        self._due = ended + max(REFRESH_S, (ended - started) / DRAWING_SHARE)


class LineWatcher:
    """Keeps the board without drawing it, and says one line for every prompt that both modes have answered."""

    def __init__(self, board: Board, say: Callable[[str], None]) -> None:
        self._board = board
        self._say = say
        self._first: Run | None = None

    def begin(self, heat: Heat) -> None:
        """Nothing is said before there is a result."""
        self._board.begin(heat)

    def round(self, heat: Heat, round_: Round) -> None:
        """Keep the round."""
        self._board.round(heat, round_)

    def end(self, run: Run) -> None:
        """Say how the two modes did, after the second."""
        self._board.end(run.heat.mode)
        if self._first is None:
            self._first = run
            return
        by_mode = {r.heat.mode: summarise(r.rounds) for r in (self._first, run)}
        self._first = None
        plain, dspark = by_mode["plain"], by_mode["dspark"]
        ratio = f", {dspark.tokens_per_s / plain.tokens_per_s:.2f}×" if plain.tokens_per_s else ""
        length = f", τ {dspark.mean_accepted_length:.2f}" if dspark.mean_accepted_length else ""
        self._say(
            f"[{run.heat.number + 1}/{run.heat.total}] {run.heat.name}: plain {plain.tokens_per_s:.1f} tok/s,"
            f" DSpark {dspark.tokens_per_s:.1f} tok/s{length}{ratio}"
        )


def fits(console: Console) -> bool:
    """Whether the live view can be shown here."""
    width, height = console.size
    # A console may be told to take a pipe for a terminal; control codes belong on a real one.
    if not console.file.isatty():
        return False
    return console.is_terminal and not console.is_dumb_terminal and width >= SMALLEST[0] and height >= SMALLEST[1]


def closing(board: Board, result: dict[str, Any], console: Console, height: int) -> Group:
    """The last view of the board with the table and the verdicts below it."""
    return Group(board.render(console, console.width, height), summary(result), *map(Text, verdicts(result)))


def picture(board: Board, result: dict[str, Any]) -> str:
    """The last view, table and verdicts as SVG that loads nothing from anywhere."""
    width, height = PICTURE
    console = Console(
        width=width, height=height, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(closing(board, result, console, height))
    svg = console.export_svg(title="dspark race", unique_id="race")
    svg = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
