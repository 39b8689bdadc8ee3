"""`dspark models`: list, pull and show the known pairs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from local_runner.doctor_command import doctor, place_of
from local_runner.fetch_hub import read_record, record_path
from local_runner.pairs import (
    DEFAULT_PAIR,
    HUB_ID,
    FolderSource,
    HubSource,
    PackageSource,
    Pair,
    Source,
    TargetSource,
    load_pair,
    pair_files,
)
from local_runner.progress import shown
from local_runner.store import Status, pull, sources, status
from sglang_dspark.errors import CheckFailed, InputError

models_app = typer.Typer(help="List, fetch and show the known pairs of target and draft head.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A pair's name, as `dspark models list` shows it.")]
Any_ = Annotated[str, typer.Argument(help="A pair's name, or a draft: a folder, a .gguf file or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]


@models_app.command("list")
def list_pairs(as_json: Json = False) -> None:
    """The known pairs, and which of them are on this disk."""
    rows = [_row(load_pair(name)) for name in pair_files()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "target", "draft", "size", "pulled")
    for row in rows:
        name = f"{row['name']} (default)" if row["default"] else row["name"]
        size = "not known yet" if row["size"] is None else decimal(row["size"])
        table.add_row(*map(Text, (name, row["target"], row["draft"], size, "yes" if row["pulled"] else "no")))
    _console().print(table)


@models_app.command("pull")
def pull_pair(name: Name = DEFAULT_PAIR, as_json: Json = False) -> None:
    """Fetch a pair, or what of it is missing or damaged, and verify it. Offline if nothing is."""
    pair = load_pair(name)
    try:
        with shown() as report:
            resolved = pull(pair, report)
    except KeyboardInterrupt:
        typer.echo(f"Cancelled; run `dspark models pull {name}` again to finish.", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(
            json.dumps({"name": name, "target_path": str(resolved.target_path), "draft_path": str(resolved.draft_path)})
        )
        return
    typer.echo(f"{name} is complete and verified.\ntarget: {resolved.target_path}\ndraft:  {resolved.draft_path}")


@models_app.command("show")
def show_pair(
    name: Any_ = DEFAULT_PAIR,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute the SHA-256 of every file, not only its size.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Everything known of a pair: sources, licences, pins, where its files are, whether they are sound, and which
    engines run it. Of a folder, file or hub id that is no pair's, what `dspark doctor` says of it as a draft.
    """
    if name not in pair_files() and (os.path.exists(os.path.expanduser(name)) or HUB_ID.fullmatch(name)):
        doctor(name, as_json=as_json)
        return
    pair = load_pair(name)
    details = _details(pair, verify)
    if as_json:
        typer.echo(json.dumps(details, indent=2))
    else:
        _console().print(_table(details))
    damaged = [part["problem"] for part in (details["target"], details["draft"]) if part.get("state") == "damaged"]
    if verify and damaged:
        raise CheckFailed(f"{damaged[0]}; run `dspark models pull {name}`.")


def _table(details: dict[str, Any]) -> Table:
    table = Table("what", "value", show_header=False)
    for key, value in _flat(details):
        table.add_row(Text(key), Text("-" if value is None else str(value)))
    return table


def _console() -> Console:
    """Standard output; wide enough on a pipe that no line is broken for a terminal that is not there."""
    return Console(width=None if sys.stdout.isatty() else 200)


def _row(pair: Pair) -> dict[str, Any]:
    found = [status(source, hashes=False) for source in sources(pair)]
    sizes = [one.size for one in found]
    return {
        "name": pair.name,
        "target": _origin(pair.target),
        "draft": "in the target" if isinstance(pair.draft, TargetSource) else _origin(pair.draft),
        "size": None if None in sizes else sum(size for size in sizes if size is not None),
        "pulled": all(one.problem is None for one in found),
        "default": pair.name == DEFAULT_PAIR,
    }


def _origin(source: Source) -> str:
    match source:
        case PackageSource():
            return f"{source.member.rpartition('/')[2]} in {source.distribution} {source.version}"
        case HubSource():
            return source.repo
        case FolderSource():
            return source.path.name


def _details(pair: Pair, verify: bool) -> dict[str, Any]:
    found = [status(source, hashes=verify) for source in sources(pair)]
    draft = (
        {"source": "target", **asdict(pair.draft)}
        if isinstance(pair.draft, TargetSource)
        else _part(pair.draft, found[-1])
    )
    return {
        "name": pair.name,
        "description": pair.description,
        "block": pair.block,
        "target": _part(pair.target, found[0]),
        "draft": draft,
        "engines": dict(pair.engines),
        "conversions": dict(pair.conversions),
        "verdicts": _verdicts(pair) if all(one.problem is None and one.path for one in found) else None,
        "file": str(pair.file),
    }


def _verdicts(pair: Pair) -> dict[str, str] | None:
    """What the doctor says of each engine, from the headers of files that are here; None if they cannot be read."""
    from sglang_dspark.checkpoints import doctor as judge
    from sglang_dspark.checkpoints.registry import read_draft
    from sglang_dspark.checkpoints.targets import read_target

    try:
        draft, target = (place_of(pair.name, is_draft=is_draft, pull=False) for is_draft in (True, False))
        report = judge.examine(judge.subject(read_draft(draft), read_target(target), None), [], pair.name)
    except InputError:
        return None
    remedies = {v.engine: "; ".join(dict.fromkeys(r.remedy for r in v.reasons if r.remedy)) for v in report.verdicts}
    return {e.engine: e.level + (f" ({remedies[e.engine]})" if remedies[e.engine] else "") for e in report.verdicts}


def _part(source: Source, found: Status) -> dict[str, Any]:
    """One source with its pins, where it is and its state. Only what JSON can hold."""
    kinds = {PackageSource: "package", HubSource: "hub", FolderSource: "folder"}
    part: dict[str, Any] = {"source": kinds[type(source)]} | asdict(source)
    if isinstance(source, FolderSource):
        part["path"] = str(source.path)
    if isinstance(source, HubSource):
        record = read_record(source)
        part["commit"] = record.commit if record else None
        part["record"] = str(record_path(source)) if record else None
    return part | {
        "size": found.size,
        "stored_at": str(found.path) if found.path else None,
        "state": found.state,
        "problem": found.problem,
    }


def _flat(details: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in details.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows
