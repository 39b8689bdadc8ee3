"""The command `dspark evaluate`: open the engine, decode the tasks, show and store what came of it."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from local_runner.engine import Engine, Mode
from local_runner.options import OUTPUT, PROMPT, Settings, open_engine, shared
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from local_runner.evaluation import Algorithm

say = partial(typer.echo, err=True)


@shared(max_new_tokens=256)
def evaluate(
    settings: Settings,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="A.jsonl,B.jsonl",
            help='Files of conversations: {"turns": ["…", …]} a line, with an id and a domain if you like.',
            rich_help_panel=PROMPT,
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="At most so many conversations of each task.", rich_help_panel=PROMPT),
    ] = None,
    algorithm: Annotated[
        Literal["dspark", "lookup", "none"] | None,
        typer.Option(
            "--algorithm",
            help="What drafts: the head, prompt look-up, or nothing. Default: the head, if there is one.",
            rich_help_panel="Drafting",
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the result as JSON; - is standard output.", rich_help_panel=OUTPUT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Write charts of the result as SVG.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Measure how much of a draft the target accepts, on tasks: τ, acceptance by position, how sound confidence is.

    τ is the mean accepted length, tokens that a round commits, with the target's own among them: 1 is plain decoding.
    """
    from local_runner.evaluation import check_fit, decode_tasks, evaluation, picture
    from local_runner.files import whole_file
    from local_runner.interrupt import cancel_on_interrupt
    from local_runner.tasks import read_tasks

    chosen = read_tasks(tasks, limit)
    decoding = settings.decoding()
    to_stdout = json_file is not None and str(json_file) == "-"
    with ExitStack() as stack:
        # Files are opened before the work, so that one that cannot be written is not found out after it.
        stored = stack.enter_context(whole_file(json_file)) if json_file and not to_stdout else None
        image = stack.enter_context(whole_file(plot)) if plot else None
        engine, name, how = _open(settings, algorithm)
        mode: Mode = "plain" if how == "none" else "dspark"
        if mode == "dspark":
            decoding = decoding.measured(engine)
        check_fit(engine, chosen)
        with cancel_on_interrupt() as cancelled:
            talks = decode_tasks(engine, chosen, decoding, mode, say=say, cancelled=cancelled)
            if cancelled.is_set():
                say("Cancelled; nothing was stored.")
                raise typer.Exit(130)
        result = evaluation(engine, name, how, talks, decoding)
        if result["turns_left_out"]:
            say(f"Note: {result['turns_left_out']} turns were left out, because their conversations fill the context.")
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        if stored:
            stored.write(text)
        if image:
            image.write(picture(result))
    show(result, to_stderr=to_stdout)
    if to_stdout:
        sys.stdout.write(text)


def show(result: dict[str, Any], *, to_stderr: bool = False) -> None:
    """The result's table, for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from local_runner.board import printable

    table = result["tables"]["evaluate"]
    columns, *others = table["columns"]
    shown = Table(columns, title_justify="left")
    for column in others:
        shown.add_column(column, justify="right")
    for row in table["rows"]:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(stderr=to_stderr)
    console = console if console.file.isatty() else Console(stderr=to_stderr, width=120, color_system=None)
    console.print(shown)


def _open(settings: Settings, asked: Algorithm | None) -> tuple[Engine, str, Algorithm]:
    """The engine, its name and the algorithm: the one that was asked for, or what the pair can do."""
    from local_runner.pairs import DEFAULT_PAIR

    if asked in ("lookup", "none"):
        if settings.draft:
            raise InputError(f"--algorithm {asked} uses no draft; leave --draft out, or evaluate --algorithm dspark.")
        target = settings.target or settings.pair or DEFAULT_PAIR
        if settings.target and settings.pair:
            raise InputError("--pair already names a target; give either --pair or --target.")
        settings = replace(settings, target=target, pair=None)
    engine, name = open_engine(settings, say)
    if asked == "lookup":
        from local_runner.engines.lookup import BLOCK, LookupEngine
        from local_runner.engines.torch.engine import TorchEngine

        if not isinstance(engine, TorchEngine):
            raise InputError("Prompt look-up runs on the torch engine only; leave --engine out.")
        return LookupEngine(engine, settings.block or BLOCK), name, "lookup"
    if asked == "dspark" and not engine.block:
        raise InputError("--algorithm dspark needs a draft; add --draft, or give a --pair.")
    return engine, name, asked or ("dspark" if engine.block else "none")
