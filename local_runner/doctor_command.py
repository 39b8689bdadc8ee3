"""The command `dspark doctor`: find the checkpoint, examine it, show the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner.options import WHERE
from sglang_dspark.checkpoints.words import cut
from sglang_dspark.errors import CheckFailed, InputError

if TYPE_CHECKING:
    from sglang_dspark.checkpoints.doctor import Report
    from sglang_dspark.checkpoints.findings import Finding, Subject
    from sglang_dspark.checkpoints.places import Place

PROMPTS, PROMPT_TOKENS = 6, 256
"""What the acceptance probe reads, and how much of each."""
SECONDS = 45.0
"""After which the probe begins no other prompt."""
COLOURS = {"ok": "green", "runs": "green", "note": "cyan", "warning": "yellow", "worse": "yellow", "failure": "red",
           "fails": "red"}  # fmt: skip


def doctor(
    draft: Annotated[str | None, typer.Argument(help=f"The draft: {WHERE}.")] = None,
    target: Annotated[str | None, typer.Option("--target", help=f"The model that it drafts for: {WHERE}.")] = None,
    block: Annotated[
        int | None, typer.Option("--block", min=1, help="How many tokens somebody means to draft at once.")
    ] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Read the weights too and, with a target, measure acceptance for a minute."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of tables.")] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="NAME", help="Say what a check looks for and why; then exit.")
    ] = None,
) -> None:
    """Judge a draft checkpoint: what it is, what it fits, and which engines will run it as it was trained.

    Reads configurations and headers only, of a hub's repositories too, unless --deep is given. Exit code 1 means that
    a check failed or that no engine would run it as trained, 2 that nothing could be read.
    """
    from sglang_dspark.checkpoints import doctor as judge
    from sglang_dspark.checkpoints.registry import read_draft
    from sglang_dspark.checkpoints.targets import read_target

    if explain is not None:
        typer.echo(judge.explain(explain))
        return
    if draft is None:
        raise InputError("There is no draft to examine; give a folder, a .gguf file, a pair's name or a hub id.")
    target = target or _pairs_own(draft)
    subject = judge.subject(
        read_draft(place_of(draft, is_draft=True, pull=deep)),
        read_target(place_of(target, is_draft=False, pull=deep)) if target else None,
        block,
    )
    extra = _deep(subject, target) if deep else []
    report = judge.examine(subject, extra, draft)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, ensure_ascii=False))
    else:
        show(report)
    if not report.sound:
        failed = [f.check for f in report.findings if f.state == "failure"]
        raise CheckFailed(
            f"{draft} failed: {', '.join(dict.fromkeys(failed))}." if failed else f"No engine runs {draft} as trained."
        )


def place_of(spec: str, *, is_draft: bool, pull: bool) -> Place:
    """Where `spec` is: on this disk if it is there or `pull` fetches it, else the hub's repository itself.

    Raises InputError where that cannot be told.
    """
    from local_runner.pairs import HubSource, load_pair, pair_files
    from local_runner.progress import shown
    from local_runner.store import resolve, resolve_draft, sources
    from sglang_dspark.checkpoints.hub import HubRepo
    from sglang_dspark.checkpoints.places import Folder

    try:
        Path(spec).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be read, no such user's home
        raise InputError(f"'{cut(spec)}' cannot be looked at ({cut(str(error), 60)}); check the path.") from error
    find: Callable[..., Path] = resolve_draft if is_draft else lambda *a, **k: resolve(*a, **k).target_path
    remote = HubRepo(spec)
    if spec in pair_files():
        of_pair = sources(load_pair(spec))[-1 if is_draft else 0]
        if not isinstance(of_pair, HubSource):
            with shown() as report:
                return Folder(find(spec, may_pull=True, report=report))
        remote = HubRepo(of_pair.repo, of_pair.revision)
    elif "/" not in spec or Path(spec).expanduser().exists() or spec.startswith((".", "/", "~")):
        return Folder(find(spec))
    if pull:
        with shown() as report:
            return Folder(find(spec, may_pull=True, report=report))
    try:
        return Folder(find(spec))
    except InputError:
        return remote


def _pairs_own(draft: str) -> str | None:
    from local_runner.pairs import pair_files

    return draft if draft in pair_files() else None


def _deep(subject: Subject, target: str | None) -> list[Finding]:
    from local_runner.progress import shown
    from sglang_dspark.checkpoints import deep
    from sglang_dspark.checkpoints.findings import Finding

    with shown() as report:
        found = deep.examine_weights(subject, lambda done, total: report("Reading weights", done, total))
        if target is None or subject.config is None:
            return found
        report("Measuring acceptance", 0, 0)
        try:
            return found + _probe(subject)
        except InputError as error:
            return [*found, Finding("acceptance", "note", f"Acceptance was not measured: {error}")]


def _probe(subject: Subject) -> list[Finding]:
    """Load the pair and measure it on a few of the built-in prompts, or on made-up ids where there is no tokenizer."""
    from local_runner.engines.torch import load_engine
    from local_runner.prompts import read_prompts, take
    from sglang_dspark.checkpoints.places import Folder
    from sglang_dspark.checkpoints.probe import acceptance, measure

    places = (subject.target.place if subject.target else None, subject.draft.place)
    paths = [p.path for p in places if isinstance(p, Folder)]
    engine = load_engine(paths[0], paths[1])
    assert engine.draft is not None
    if engine.tokenizer is None:
        prompts = [[(7 * i + 3 * n) % engine.target.vocab_size for i in range(1, 17)] for n in range(PROMPTS)]
    else:
        texts = [p.turns[0] for p in take(read_prompts(), PROMPTS)]
        prompts = [engine.encode_chat([{"role": "user", "content": t}])[:PROMPT_TOKENS] for t in texts]
    return list(acceptance(measure(engine.target, engine.draft, prompts, engine.target.layers, SECONDS)))


def show(report: Report) -> None:
    """The report as two tables on standard output."""
    from sglang_dspark.checkpoints.findings import BASIS, ENGINES

    console = Console(width=None if sys.stdout.isatty() else 160)
    against = f" for {report.target}" if report.target else ""
    console.print(Text(f"{report.draft}{against}"), highlight=False)
    checks = Table("check", "", "what was found", "what to do", title_justify="left")
    for f in report.findings:
        checks.add_row(f.check, Text(f.state, COLOURS[f.state]), Text(f.text), Text(f.remedy))
    console.print(checks)
    engines = Table("engine", "", "why", "what to do", "judged by")
    for v in report.verdicts:
        why = "\n".join(dict.fromkeys(r.why for r in v.reasons))
        remedy = "\n".join(dict.fromkeys(r.remedy for r in v.reasons if r.remedy))
        engines.add_row(ENGINES[v.engine], Text(v.level, COLOURS[v.level]), Text(why), Text(remedy), BASIS[v.engine])
    console.print(engines)
    console.print(Text("dspark doctor --explain NAME says what a check looks for."), highlight=False)
