"""The command `dspark plan`: what is on this machine or another, and where everything of a pair would live there.

`python -m local_runner.plan_command --store DIR [--check]` writes the stored plans: every known machine with every
published shape, a page a machine. With --check nothing is written, and the exit code is 1 if a page is stale.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from local_runner.options import WHERE
from sglang_dspark.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from local_runner.footprint import Footprint
    from local_runner.machine import Machine
    from local_runner.placement import Plan

STORE = "python -m local_runner.plan_command --store results/plans"
CONTEXT = 8192


def plan(
    target: Annotated[
        str | None, typer.Option("--target", help=f"The model: {WHERE}, or the name of a published shape.")
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help=f"Its DSpark draft: {WHERE}.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="A known pair: its target and its draft.")] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", metavar="FILE|NAME", help="A machine file or a known machine. Default: this one."),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of room for each user.")] = CONTEXT,
    users: Annotated[int, typer.Option("--users", min=1, help="Conversations that are kept at once.")] = 1,
    throughput: Annotated[
        bool, typer.Option("--throughput/--latency", help="Plan for all users at once, or for one at a time.")
    ] = False,
    dtype: Annotated[
        Literal["stored", "bfloat16", "float16", "float32"],
        typer.Option("--dtype", help="What the target's weights are unpacked to."),
    ] = "stored",
    cache_dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "int8"], typer.Option("--cache-dtype", help="What caches hold.")
    ] = "bfloat16",
    head_dtype: Annotated[
        Literal["stored", "int8"], typer.Option("--head-dtype", help="What the draft's weights are held in.")
    ] = "stored",
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")] = False,
) -> None:
    """Show where target, draft and caches would live, what a step would take, and what would have to change to fit.

    Reads configurations and headers only. Times are what reading memory takes at least, with full contexts; arithmetic
    comes on top where it is slower. Exit code 1 means that it does not fit, 2 that something could not be read.
    """
    from local_runner.machine import load_machine
    from local_runner.machine.here import this_machine
    from local_runner.placement import place
    from local_runner.placement.items import Wishes

    wishes = Wishes(
        context=context,
        users=users,
        goal="throughput" if throughput else "latency",
        dtype=None if dtype == "stored" else dtype,
        cache_dtype=cache_dtype,
        head_dtype=None if head_dtype == "stored" else head_dtype,
    )
    found = footprint_of(target, draft, pair)
    made = place(this_machine() if machine is None else load_machine(machine), found, wishes)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=1, ensure_ascii=False))
    else:
        from rich.console import Console

        from local_runner.plan_view import show

        show(made, Console(width=None if sys.stdout.isatty() else 160))
    if not made.fits:
        raise CheckFailed(f"{found.name} does not fit on {made.machine.name}.")


def footprint_of(target: str | None, draft: str | None, pair: str | None) -> Footprint:
    """What the options name. A pair's files are used where they are on this disk, else its published shape, else the
    headers on its hub. Raises InputError for what cannot be found or read, or options that contradict each other.
    """
    from local_runner.footprint.shapes import published, shape_files
    from local_runner.pairs import DEFAULT_PAIR

    if pair and (target or draft):
        raise InputError("--pair already names a target and a draft; give either --pair, or --target and --draft.")
    if draft and not target:
        raise InputError("--draft needs a target to draft for; add --target.")
    model = pair or target or DEFAULT_PAIR
    drafted = draft if target else model
    if model in shape_files() and not Path(model).exists() and not _is_here(model):
        shape = published(model)
        if drafted in (None, model):
            return shape if drafted else replace(shape, draft=None)
        raise InputError(f"{model} is a published shape here; a draft of other files needs the target's own files.")
    return _read(model, drafted)


def _read(target: str, draft: str | None) -> Footprint:
    from local_runner.doctor_command import place_of
    from local_runner.footprint.read import read_footprint
    from sglang_dspark.checkpoints.registry import read_draft

    where = place_of(target, is_draft=False, pull=False)
    return read_footprint(where, read_draft(place_of(draft, is_draft=True, pull=False)) if draft else None)


def _is_here(name: str) -> bool:
    """Whether the pair of that name has been fetched."""
    from local_runner.pairs import load_pair, pair_files
    from local_runner.store import sources, status

    if name not in pair_files():
        return False
    return all(status(source, hashes=False).problem is None for source in sources(load_pair(name)))


def pages() -> dict[str, str]:
    """The stored plans: a page for each known machine, by its file name."""
    from local_runner.footprint.shapes import published, shape_files
    from local_runner.machine import load_machine, machine_files
    from local_runner.placement import place
    from local_runner.placement.items import Wishes
    from local_runner.plan_view import page

    def plans(machine: Machine) -> list[Plan]:
        return [place(machine, published(name), Wishes(context=CONTEXT)) for name in shape_files()]

    return {f"{name}.md": page(plans(load_machine(name)), STORE) for name in machine_files()}


def store(folder: Path, *, check: bool) -> None:
    """Write the stored plans into `folder`, or with `check` raise CheckFailed if one is not what it would be."""
    from local_runner.files import whole_file

    for name, text in pages().items():
        file = folder / name
        if check:
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                raise CheckFailed(f"The stored plan {file} is stale; run {STORE}.")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as stream:
                stream.write(text)


def main(arguments: list[str]) -> int:
    """The command that stores plans; returns its exit code."""
    folders = [a for a in arguments if not a.startswith("-")]
    if "--store" not in arguments or len(folders) != 1 or set(arguments) - {"--store", "--check", *folders}:
        print("Usage: python -m local_runner.plan_command --store DIR [--check]", file=sys.stderr)
        return 2
    try:
        store(Path(folders[0]), check="--check" in arguments)
    except (InputError, CheckFailed) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
