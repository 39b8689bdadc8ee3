"""The command `dspark launch`: check, then become an SGLang server with DSPARK."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from local_runner.pairs import HubSource, config_root, load_pair, pair_files
from sglang_dspark.errors import InputError

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""How typer is to treat the arguments that are SGLang's."""


def launch(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option("--target", help="The target: a folder, a hub id or a pair on a hub.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="The draft; left out where the target's checkpoint has one.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="FILE", help="Arguments from a file, or one of configs/serving.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
) -> None:
    """Start `sglang.launch_server` with DSPARK, once the draft has been judged.

    Every other option is SGLang's and is passed on: --port, --tp-size, --api-key, … --device cpu works too.
    """
    from sglang_dspark.serving import launch as server

    chosen = server.read_recipe(_recipe(recipe)) if recipe is not None else server.Recipe()
    target, draft = of_pair(target, draft)
    version = None if dry_run else server.check_sglang()
    found = server.prepare(target, draft, chosen, context.args, local=dry_run)
    shown = [f"{name}={shlex.quote(value)}" for name, value in found.environment.items()]
    for note in found.notes if dry_run else (f"SGLang {version}", *found.notes):
        typer.echo(f"DSPARK: {note}", err=True)
    if dry_run:
        typer.echo(" ".join([*shown, shlex.join(found.command)]))
        return
    sys.stdout.flush()
    os.execvpe(found.command[0], list(found.command), {**os.environ, **found.environment})


def of_pair(target: str | None, draft: str | None) -> tuple[str | None, str | None]:
    """The hub ids of a pair that `target` names; anything else as it is. Raises InputError for pairs of other kinds."""
    if target is None or target not in pair_files() or Path(target).exists():
        return target, draft
    pair = load_pair(target)
    if not isinstance(pair.target, HubSource):
        raise InputError(
            f"The pair '{target}' is not of a form that SGLang reads; give its target and draft as safetensors folders."
        )
    return pair.target.repo, draft or (pair.draft.repo if isinstance(pair.draft, HubSource) else None)


def _recipe(named: str) -> Path:
    """A recipe's file, or that of a shipped one by its name."""
    shipped = config_root() / "serving" / f"{named}.toml"
    return shipped if shipped.is_file() and not Path(named).exists() else Path(named)
