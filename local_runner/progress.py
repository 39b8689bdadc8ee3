"""Progress of long fetches: a bar for people at a terminal, one plain line for each stage anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

Report = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all (0 where there is nothing to count)."""


def silent(what: str, done: int, total: int) -> None:
    """A Report that says nothing."""


@contextmanager
def shown(console: Console | None = None) -> Iterator[Report]:
    """A Report that shows on `console`, standard error by default, and writes control codes to terminals only."""
    console = console or Console(stderr=True)
    if not (console.is_terminal and console.file.isatty()):
        seen: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                size = f" ({decimal(total)})" if total else ""
                console.print(f"{what}{size} ...", markup=False, highlight=False, soft_wrap=True)

        yield line
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=min(done, total))

        yield bar
