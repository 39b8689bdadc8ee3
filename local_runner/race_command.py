"""The command `dspark race`: open the engine, run the race where the user can follow it, judge it, store it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import typer
from rich.console import Console

from local_runner.board import Board, summary, verdicts
from local_runner.engine import Engine
from local_runner.files import whole_file
from local_runner.identity import judge
from local_runner.interrupt import cancel_on_interrupt
from local_runner.options import Settings, open_engine
from local_runner.prompts import Prompt
from local_runner.race import Watcher, race, record, warm_up
from local_runner.result import race_result
from local_runner.watch import LineWatcher, LiveWatcher, closing, fits, picture
from local_runner.watchdog import watching
from sglang_dspark.errors import InputError

CLOSING_LINES = 24


def run(
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    repeats: int,
    json_file: Path | None,
    folder: Path | None,
    svg: Path | None,
    say: Callable[[str], None],
) -> None:
    """Race, show, store. Raises typer.Exit with 1 if the tokens are not the same, with 130 if it was interrupted, and
    CheckFailed if the host ran short of memory; then nothing is stored.
    """
    decoding = settings.decoding(suited=True)
    to_stdout = json_file is not None and str(json_file) == "-"
    console = Console(stderr=to_stdout)
    with ExitStack() as stack:
        # Files are opened before the race, so that one that cannot be written is not found out after it.
        stored = stack.enter_context(whole_file(json_file)) if json_file and not to_stdout else None
        image = stack.enter_context(whole_file(svg)) if svg else None
        if folder:
            make_folder(folder)
        engine, name = open_engine(settings, say, suited=True)
        if not engine.block:
            raise InputError("A race needs a draft as well as a target; add --draft, or give a --pair.")
        decoding = decoding.measured(engine)
        board = Board(engine, heading(engine, name))
        live = fits(console) and json_file is None
        with cancel_on_interrupt() as cancelled, watching(engine.description, cancelled) as dog:
            say("Warming up ...")
            warm_up(engine, prompts[0], decoding, cancelled)
            with ExitStack() as shown:
                watcher: Watcher = shown.enter_context(LiveWatcher(board, console)) if live else LineWatcher(board, say)
                runs = race(engine, prompts, decoding, repeats=repeats, watcher=watcher, cancelled=cancelled)
            dog.raise_trouble()
            if cancelled.is_set():
                say("Cancelled; nothing was stored.")
                raise typer.Exit(130)
            say("Comparing the answers ...")
            identity = judge(engine, runs, decoding)
        result = race_result(engine, name, runs, identity, decoding)
        if folder:
            record(runs, folder)
        if image:
            image.write(picture(board, result))
        if stored:
            stored.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if live:
        console.print(closing(board, result, console, min(CLOSING_LINES, console.height - 1)))
    else:
        plain = Console(stderr=to_stdout, width=max(80, console.width), color_system=None, force_terminal=False)
        plain.print(summary(result), *verdicts(result), sep="\n", highlight=False, markup=False, soft_wrap=True)
    if to_stdout:
        sys.stdout.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if identity.verdict == "failure":
        raise typer.Exit(1)


def heading(engine: Engine, name: str) -> str:
    """One line on what races: the pair's name, precision, device and threads."""
    description = engine.description
    facts = [name, *(str(description[k]) for k in ("dtype", "device") if description.get(k))]
    if description.get("threads"):
        facts.append(f"{description['threads']} threads")
    return " · ".join(facts)


def make_folder(folder: Path) -> None:
    """Make `folder` where it is not there. Raises InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"The folder {folder} cannot be made ({error.strerror}); choose another for --record."
        ) from error
