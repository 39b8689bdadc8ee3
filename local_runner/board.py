"""What a race looks like in a terminal: two panes of text, a bar per block position, and the figures so far.

Tokens carry their origin by more than colour: an accepted draft is underlined, the target's own token is not, and `▸`
stands before a bonus, the token that comes free when a whole block is accepted. What the target rejected in the last
round stands struck through behind the text until the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from local_runner.engine import Engine, Mode, text_stream
from local_runner.race import Heat
from local_runner.report import RACE_COLUMNS, number, race_rows
from sglang_dspark.decoding.rounds import Round

ACCEPTED = "underline green"
BONUS = "cyan"
GHOST = "dim strike"
TITLES: dict[Mode, str] = {"plain": "plain", "dspark": "DSpark"}
BARS = 3
FRAME = BARS + 5
"""Lines that are not panes: title, prompt, bars with two lines of labels, legend."""
EIGHTHS = " ▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """`text` without control characters other than line feed and tab: a model's output must not steer the terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() or not ("\0" <= c < " " or "\x7f" <= c < "\xa0") else "�" for c in text
    )


class Pane:
    """One mode's answer. Rounds are only kept as they come; they become text when they are shown."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stream = text_stream(engine)
        self._rounds: list[Round] = []
        self._shown = 0
        self._text = Text()
        self.tokens = self.steps = self.committed = self.accepted = 0
        self.seconds = 0.0
        self.running = False

    def add(self, round_: Round) -> None:
        """Take in a round; the prefill (index 0) does not count for the rates."""
        self._rounds.append(round_)
        self.tokens += len(round_.committed)
        if round_.index > 0:
            self.steps += 1
            self.committed += len(round_.committed)
            self.accepted += round_.accepted
            self.seconds += round_.draft_s + round_.verify_s

    def text(self) -> Text:
        """The answer so far, marked by origin, with the ghost of what the last round rejected while it is running."""
        for round_ in self._rounds[self._shown :]:
            own = min(round_.accepted, len(round_.committed))
            self._text.append(printable(self._stream.push(round_.committed[:own])), ACCEPTED)
            bonus = 0 < round_.scheduled == round_.accepted and own < len(round_.committed)
            if bonus:
                self._text.append("▸", BONUS)
            self._text.append(printable(self._stream.push(round_.committed[own:])), BONUS if bonus else "")
        self._shown = len(self._rounds)
        shown = self._text.copy()
        if self.running and self._rounds:
            last = self._rounds[-1]
            rejected = text_stream(self._engine).push(last.drafted[last.accepted : last.scheduled])
            shown.append(printable(rejected), GHOST)
        return shown

    def panel(self, console: Console, mode: Mode, width: int, height: int) -> Panel:
        """The pane at this size, with the last lines of the text that fit."""
        inner = max(1, width - 4)
        # Only what can be on the screen is wrapped, so that a long answer costs no more than a short one.
        lines = self.text()[-inner * height :].wrap(console, inner)[-(height - 2) :]
        rate = f"{self.committed / self.seconds:.1f} tok/s" if self.seconds else ""
        length = f" · τ {(self.accepted + self.steps) / self.steps:.2f}" if mode == "dspark" and self.steps else ""
        state = f"{self.tokens} tokens{length}" if self.running or self.tokens else "waits its turn"
        return Panel(
            Text("\n").join(lines),
            box=box.ROUNDED,
            title=Text.assemble((TITLES[mode], "bold"), f"  {rate}" if rate else ""),
            subtitle=Text(state, "dim" if not self.running else ""),
            title_align="left",
            subtitle_align="right",
            border_style=("cyan" if mode == "dspark" else "white") if self.running else "bright_black",
            width=width,
            height=height,
        )


class Board:
    """The state of a race as it is shown. Follows a race as its watcher; `render` draws it at any size."""

    def __init__(self, engine: Engine, heading: str) -> None:
        self._engine = engine
        self._heading = heading
        self._heat: Heat | None = None
        self._panes: dict[Mode, Pane] = {}
        self._tried, self._kept = [0] * engine.block, [0] * engine.block
        self._tokens: dict[Mode, int] = {"plain": 0, "dspark": 0}
        self._seconds: dict[Mode, float] = {"plain": 0.0, "dspark": 0.0}

    def begin(self, heat: Heat) -> None:
        """A heat starts; the first of a prompt clears the panes."""
        before = self._heat
        if before is None or (before.number, before.turn, before.repeat) != (heat.number, heat.turn, heat.repeat):
            self._panes = {"plain": Pane(self._engine), "dspark": Pane(self._engine)}
        self._heat = heat
        self._panes[heat.mode].running = True

    def round(self, heat: Heat, round_: Round) -> None:
        """A round is done."""
        self._panes[heat.mode].add(round_)
        for k in range(min(round_.scheduled, len(self._tried))):
            self._tried[k] += 1
            self._kept[k] += round_.accepted > k

    def end(self, mode: Mode) -> None:
        """A heat is over; it counts for the figures so far."""
        pane = self._panes[mode]
        pane.running = False
        self._tokens[mode] += pane.committed
        self._seconds[mode] += pane.seconds

    def render(self, console: Console, width: int, height: int) -> RenderableType:
        """The board as `height` lines of `width` columns."""
        heat = self._heat
        if heat is None:
            return Text(self._heading, "bold", overflow="ellipsis", no_wrap=True)
        progress = f"prompt {heat.number + 1} of {heat.total} · {heat.prompt.domain}"
        if heat.repeat:
            progress += f" · repeat {heat.repeat + 1}"
        left = width // 2
        panes = Table.grid()
        panes.add_row(
            self._panes["plain"].panel(console, "plain", left, height - FRAME),
            self._panes["dspark"].panel(console, "dspark", width - left, height - FRAME),
        )
        question = Text(printable(heat.question).replace("\n", " "), "italic", overflow="ellipsis", no_wrap=True)
        return Group(
            _ends(Text(self._heading, "bold"), Text(progress, "dim"), width), question, panes, self._chart(width)
        )

    def _chart(self, width: int) -> RenderableType:
        """Bars of survival by block position, the speed-up so far, and the legend: BARS + 3 lines."""
        survival = [kept / tried if tried else None for kept, tried in zip(self._kept, self._tried, strict=True)]
        block = max(1, len(survival))
        cell = max(2, min(7, (width - 26) // block))
        lines = [Text(" ") for _ in range(BARS + 2)]
        for position, share in enumerate(survival, start=1):
            for row, piece in enumerate(bar(share or 0.0, BARS)):
                lines[row].append((piece * (cell - 2)).center(cell) if cell > 2 else piece + " ", "green")
            lines[BARS].append((number(share, ".0%") if cell > 4 else "").center(cell))
            lines[BARS + 1].append(str(position).center(cell), "dim")
        lines[BARS + 1].append(" position in block, survival" if width - cell * block > 34 else "", "dim")
        figures = Table.grid()
        figures.add_column(width=cell * block + 2 + (28 if width - cell * block > 34 else 0), no_wrap=True)
        figures.add_column(no_wrap=True)
        notes = [*self._so_far(), *[Text()] * len(lines)]
        for line, note in zip(lines, notes, strict=False):
            figures.add_row(line, note)
        legend = Text.assemble(
            " ", ("accepted draft", ACCEPTED), "  ", ("▸bonus", BONUS), "  target's own  ", ("rejected draft", GHOST)
        )
        return Group(figures, legend)

    def _so_far(self) -> list[Text]:
        rates = {m: self._tokens[m] / s if (s := self._seconds[m]) else None for m in self._tokens}
        lines = [
            Text(f"{TITLES[m]:<7}{number(rate, '.1f'):>6} tok/s", "" if rate else "dim") for m, rate in rates.items()
        ]
        plain, dspark = rates["plain"], rates["dspark"]
        if plain and dspark:
            lines.append(Text(f"so far {dspark / plain:6.2f}×", "bold"))
        return lines


def bar(share: float, rows: int) -> list[str]:
    """A vertical bar of `share` (0 to 1) as one block character a row, from the top."""
    filled = round(share * rows * 8)
    return [EIGHTHS[min(8, max(0, filled - 8 * (rows - 1 - row)))] for row in range(rows)]


def summary(result: dict[str, Any]) -> Table:
    """The table of a finished race, by domain (see `result.race_result`)."""
    shown = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in RACE_COLUMNS:
        shown.add_column(name, justify="left" if name == "domain" else "right", no_wrap=True)
    rows: Sequence[tuple[str, ...]] = race_rows(result)
    for row in rows:
        shown.add_row(*row, style="bold" if row is rows[-1] else "")
    return shown


def verdicts(result: dict[str, Any]) -> list[str]:
    """What a race says in words: who is faster, whether the tokens are the same, where time went unaccounted."""
    speedup = result["speedup"]
    if speedup is None:
        speed = "Nothing to compare: no answer went beyond its first token."
    elif speedup >= 1:
        speed = f"DSpark is {speedup:.2f}× as fast as plain decoding of the same engine."
    else:
        speed = (
            f"DSpark is SLOWER here: {speedup:.2f}× the speed of plain decoding. Plain decoding is the better choice."
        )
    return [speed, result["identity"]["sentence"]]


def _ends(left: Text, right: Text, width: int) -> Text:
    left = left.copy()
    left.truncate(max(1, width - right.cell_len - 2), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right)
