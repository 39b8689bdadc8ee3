"""The program `dspark`. Exit codes: 0 done, 1 the thing checked is not so, 2 wrong usage or input, 130 interrupted.

What needs PyTorch is imported by the commands that need it, so that `--help` is quick.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from local_runner.calibrate_command import calibrate
from local_runner.convert_command import convert
from local_runner.doctor_command import doctor
from local_runner.engine import Mode, encode
from local_runner.evaluate_command import evaluate
from local_runner.launch_command import CONTEXT, launch
from local_runner.models_cli import models_app
from local_runner.options import OUTPUT, PROMPT, Settings, open_engine, shared
from local_runner.plan_command import plan
from local_runner.prompts import Prompt, parse_ids, read_prompts, take
from local_runner.prove_command import load, prove
from local_runner.serve_command import serve
from local_runner.train_command import synthesise, train
from sglang_dspark.errors import CheckFailed, InputError

Plain = Annotated[bool, typer.Option("--plain", help="Decode without the draft.", rich_help_panel="Drafting")]
OnePrompt = Annotated[str | None, typer.Option("--prompt", help="What the user says.", rich_help_panel=PROMPT)]
PromptIds = Annotated[
    str | None,
    typer.Option(
        "--prompt-ids", metavar="1,2,3", help="Token ids, bypassing template and tokenizer.", rich_help_panel=PROMPT
    ),
]


ORDER = (
    "demo",
    "race",
    "generate",
    "chat",
    "serve",
    "plan",
    "models",
    "doctor",
    "convert",
    "synthesise",
    "train",
    "calibrate",
    "evaluate",
)


class Program(TyperGroup):
    """Turns the two errors that are meant for people into one line and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """What one tries first comes first; commands that `ORDER` does not know come last."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (InputError, CheckFailed) as error:
            say(f"Error: {error}")
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error


app = typer.Typer(
    cls=Program,
    name="dspark",
    help="DSpark speculative decoding on one machine: race it, generate with it, chat with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(models_app, name="models")
app.command()(doctor)
app.command()(convert)
app.command()(plan)
app.command()(synthesise)
app.command()(train)
app.command()(serve)
app.command(context_settings=CONTEXT)(launch)
app.command(context_settings=CONTEXT)(prove)
app.command()(load)
app.command()(calibrate)
app.command()(evaluate)
with suppress(ModuleNotFoundError):  # by name, because the page stands on this package and not the other way round
    app.command()(importlib.import_module("ui.command").demo)


@app.command()
@shared(max_new_tokens=128)
def race(
    settings: Settings,
    prompt: OnePrompt = None,
    prompt_ids: PromptIds = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='A JSONL file: {"prompt": …} or {"turns": […, …]} a line, with an id and a domain if you like.',
            rich_help_panel=PROMPT,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="At most so many prompts, from all domains alike.", rich_help_panel=PROMPT),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Race so many times; medians are kept.", rich_help_panel=PROMPT)
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the result as JSON; - is standard output.", rich_help_panel=OUTPUT
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="DIR", help="Write every run, one Round a line.", rich_help_panel=OUTPUT),
    ] = None,
    screenshot: Annotated[
        Path | None,
        typer.Option("--screenshot", metavar="FILE.svg", help="Write the final view as SVG.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Race plain decoding against DSpark on the same prompts, and check that both say the same.

    Thirty built-in prompts (chat, code, maths) unless others are given. Exit code 1 means that DSpark's tokens differ
    from plain decoding's and arithmetic noise does not explain it.
    """
    if settings.max_new_tokens < 2:
        raise InputError("--max-new-tokens must be at least 2 in a race, because the first token is not timed.")
    chosen = take(_race_prompts(prompt, prompt_ids, prompts), limit)
    from local_runner.race_command import run

    run(settings, chosen, repeats=repeats, json_file=json_file, folder=record, svg=screenshot, say=say)


@app.command()
@shared(max_new_tokens=256)
def generate(
    settings: Settings,
    plain: Plain = False,
    prompt: OnePrompt = None,
    prompt_ids: PromptIds = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.", rich_help_panel=OUTPUT)
    ] = False,
    events: Annotated[
        Path | None, typer.Option("--events", metavar="FILE", help="Write one Round a line.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Answer one prompt, streamed to standard output.

    Without --prompt the prompt is read from standard input. Decoding is plain without a draft, or with --plain.
    """
    from local_runner.answer import answer, write_out
    from local_runner.files import whole_file
    from local_runner.interrupt import cancel_on_interrupt
    from local_runner.room import used
    from local_runner.watchdog import watching

    if prompt is not None and prompt_ids is not None:
        raise InputError("--prompt and --prompt-ids both give the prompt; drop one of them.")
    ids = parse_ids(prompt_ids) if prompt_ids is not None else ()
    said = "" if ids else _read_prompt(prompt)
    decoding = settings.decoding()
    with ExitStack() as stack:
        stream = stack.enter_context(whole_file(events) if events else nullcontext())
        engine, name = open_engine(settings, say)
        mode: Mode = "dspark" if engine.block and not plain else "plain"
        if not ids:
            ids = encode(engine, [{"role": "user", "content": said}])
        cancelled = stack.enter_context(cancel_on_interrupt())
        dog = stack.enter_context(watching(engine.description, cancelled))
        reply = answer(
            engine,
            decoding.measured(engine) if mode == "dspark" else decoding,
            ids,
            mode,
            cancelled=cancelled,
            write=(lambda piece: None) if as_json else write_out,
            events=stream,
        )
    if as_json:
        about = {"memory": used(engine.description), "cut_short": dog.reason or None}
        typer.echo(json.dumps({"pair": name, "mode": mode, **reply.to_dict(), **about, "engine": engine.description}))
    else:
        write_out("\n")
        if sys.stdout.isatty():
            say(reply.statistics())
    dog.raise_trouble()
    if reply.stop == "cancelled":
        raise typer.Exit(130)


@app.command()
@shared(max_new_tokens=512)
def chat(
    settings: Settings,
    plain: Plain = False,
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions before the conversation.", rich_help_panel=PROMPT)
    ] = None,
) -> None:
    """Talk with the model. /reset forgets the conversation, /quit ends it, Ctrl-C stops an answer."""
    from local_runner.chat import chat as converse

    decoding = settings.decoding(suited=True)
    engine, _ = open_engine(settings, say, suited=not plain, reuse_prefix=True)
    mode: Mode = "dspark" if engine.block and not plain else "plain"
    converse(engine, decoding.measured(engine) if mode == "dspark" else decoding, mode, system, say)


def say(text: str) -> None:
    """Tell the user something that is not the result: one line on standard error."""
    typer.echo(text, err=True)


def _race_prompts(prompt: str | None, prompt_ids: str | None, file: Path | None) -> list[Prompt]:
    if sum(given is not None for given in (prompt, prompt_ids, file)) > 1:
        raise InputError("--prompt, --prompt-ids and --prompts each say what to race on; give one of them.")
    if prompt_ids is not None:
        return [Prompt("prompt", "prompt", ids=parse_ids(prompt_ids))]
    if prompt is not None:
        return [Prompt("prompt", "prompt", turns=(_read_prompt(prompt),))]
    return read_prompts(file) if file else read_prompts()


def _read_prompt(prompt: str | None) -> str:
    """The prompt that was given, or standard input where that is not a terminal."""
    if prompt is None:
        if sys.stdin.isatty():
            raise InputError("There is no prompt; give --prompt, --prompt-ids or text on standard input.")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise InputError("The prompt is empty; say something to answer.")
    return prompt


def main() -> None:
    """The entry point of the program."""
    app()


if __name__ == "__main__":
    main()
