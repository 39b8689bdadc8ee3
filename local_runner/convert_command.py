"""The command `dspark convert`: read a draft in any format, write it in another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal

from local_runner.options import WHERE
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from sglang_dspark.checkpoints.drafts import Draft
    from sglang_dspark.checkpoints.outputs import Request
    from sglang_dspark.checkpoints.targets import Target

To = Literal["deepspec", "specforge", "speculators", "sglang", "gguf", "deepseek-v4"]
GgufType = Literal["f16", "bf16", "q8_0"]
ONLY_GGUF = "GGUF"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=f"The draft: {WHERE}.")],
    to: Annotated[To, typer.Option("--to", help="The format; deepseek-v4 extracts a bundled module as it is.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help=f"The model that it drafts for, for what the draft's file leaves out: {WHERE}."),
    ] = None,
    allow_loss: Annotated[
        list[str] | None,
        typer.Option("--allow-loss", metavar="NAME", help="Accept what would be lost, by name; may be repeated."),
    ] = None,
    backbone_type: Annotated[
        GgufType | None,
        typer.Option(
            "--backbone-type", help="The type of all matrices but the Markov tables.", rich_help_panel=ONLY_GGUF
        ),
    ] = None,
    markov_type: Annotated[
        GgufType | None,
        typer.Option("--markov-type", help="The type of the Markov tables.", rich_help_panel=ONLY_GGUF),
    ] = None,
) -> None:
    """Translate a draft checkpoint into another format, exactly, or say what would be lost.

    Weights stream through, so that little memory is needed. The folder appears when all of it is written. GGUF weights
    keep the type that they have unless another is asked for; --target TARGET.gguf gives such a file its tokenizer.
    """
    from local_runner.progress import shown
    from sglang_dspark.checkpoints import convert as converter

    if to != "gguf" and (backbone_type or markov_type):
        raise InputError("--backbone-type and --markov-type are for --to gguf; leave them out.")
    draft = _draft(source)
    known = _target(target)
    request = _request(known, target, backbone_type, markov_type)
    output = converter.plan(draft, to, request, known.layers if known else None)
    converter.check_losses(output, frozenset(allow_loss or ()))
    with shown() as report:
        done = converter.write(draft, to, output, out, lambda n, total: report(f"Writing {out.name}", n, total))
    lost = f", without its {', '.join(done.lost)}" if done.lost else ""
    typer.echo(
        f"{out}: {draft.format.name} to {to}, {decimal(done.size)} of weights{lost}\nSHA-256 {done.weights_sha256}"
    )


def _draft(source: str) -> Draft:
    """The draft; fetched from a hub, but for a module inside a target, which is read in parts."""
    from local_runner.doctor_command import place_of
    from sglang_dspark.checkpoints.hub import HubRepo
    from sglang_dspark.checkpoints.registry import read_draft

    place = place_of(source, is_draft=True, pull=False)
    draft = read_draft(place)
    if isinstance(place, HubRepo) and not draft.format.prefix:
        return read_draft(place_of(source, is_draft=True, pull=True))
    return draft


def _target(target: str | None) -> Target | None:
    from local_runner.doctor_command import place_of
    from sglang_dspark.checkpoints.targets import read_target

    return read_target(place_of(target, is_draft=False, pull=False)) if target else None


def _request(known: Target | None, called: str | None, backbone: str | None, markov: str | None) -> Request:
    from sglang_dspark.checkpoints.outputs import Request

    types = {"backbone": backbone.upper() if backbone else None, "markov": markov.upper() if markov else None}
    if known is None or called is None:
        return Request(types)
    tokenizer = known.tokenizer()
    path = Path(called).expanduser()
    return Request(
        types,
        target_name=path.resolve().name if path.exists() else called,
        target_architectures=known.architectures,
        tokenizer=tokenizer,
        tokenizer_size=known.vocab_size if tokenizer else None,
    )
