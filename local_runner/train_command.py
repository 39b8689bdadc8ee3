"""The commands `dspark synthesise` and `dspark train`: a head for a model of one's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from local_runner.options import WHERE
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from local_runner.training import Where

TARGET = typer.Option("--target", help=f"The model: {WHERE}.")
MINUTES = typer.Option("--minutes", min=0.1, help="Stop after so long.")
THREADS = typer.Option("--threads", min=1, help="Processor threads. Default: all.")
RECIPE = typer.Option("--recipe", metavar="FILE", help="A TOML file with tables [synthesise], [head] and [train].")
PROMPTS = typer.Option(
    "--prompts", metavar="FILE", help="Answer these prompts (JSONL) instead of ones that the model writes."
)
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where it computes.")]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Write text in the model's own precision; slower than 8-bit products on a CPU."),
]
SYNTHESIS_SHARE = 0.4
"""Of the time of a training that makes its own text."""


def synthesise(
    target: Annotated[str, TARGET],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where shards go; more are added to what is there.")
    ],
    conversations: Annotated[
        int, typer.Option("--conversations", min=1, help="How many the folder is to hold.")
    ] = 2000,
    minutes: Annotated[float | None, MINUTES] = None,
    recipe: Annotated[Path | None, RECIPE] = None,
    prompts: Annotated[Path | None, PROMPTS] = None,
    threads: Annotated[int | None, THREADS] = None,
    device: Device = "auto",
    exact: Exact = False,
) -> None:
    """Make training text with the model itself: it writes prompts and answers them.

    Ctrl-C stops; the same command goes on. A target without a chat template continues random tokens instead.
    """
    from local_runner.interrupt import cancel_on_interrupt
    from local_runner.training import read_recipe

    _be_modest()
    _, _, settings = read_recipe(recipe)
    with cancel_on_interrupt() as cancelled:
        made = _synthesise(
            _where(target, device), settings, out, conversations, minutes, prompts, threads, exact, cancelled
        )
    typer.echo(
        f"{out}: {made['conversations']} conversations, {made['answer_tokens']} answer tokens,"
        f" {made['answer_tokens_per_s']:.0f} a second."
    )
    if cancelled.is_set():
        raise typer.Exit(130)


def train(
    target: Annotated[str, TARGET],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The head's folder; training there is continued.")
    ] = Path("head"),
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Conversations of `dspark synthesise`; else made first."),
    ] = None,
    prompts: Annotated[Path | None, PROMPTS] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.1, help="For everything; steps follow the time.")
    ] = None,
    recipe: Annotated[Path | None, RECIPE] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Of training, at most.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Of the head.")] = None,
    block: Annotated[int | None, typer.Option("--block", min=1, help="γ: tokens drafted at once.")] = None,
    markov: Annotated[
        Literal["vanilla", "gated", "rnn", "none"] | None,
        typer.Option("--markov", help="The sequential head; none is DFlash."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=1, help="Of the sequential head.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="HEAD", help="Begin with the weights of this head instead of random ones."),
    ] = None,
    feature_budget: Annotated[
        str, typer.Option("--feature-budget", help="Memory for kept features of the target; the rest is recomputed.")
    ] = "4GB",
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option("--precision", help="Of the products in training.")
    ] = "auto",
    threads: Annotated[int | None, THREADS] = None,
    device: Device = "auto",
    exact: Exact = False,
) -> None:
    """Train a DSpark head for a model, from the model's own text; nothing else is needed.

    Ctrl-C stops and writes the head as it is; the same command goes on. The head is in DeepSpec's format: serve it
    with SGLang or use it here as --draft.
    """
    from dataclasses import replace

    from local_runner.interrupt import cancel_on_interrupt
    from local_runner.training import read_recipe
    from local_runner.training import train as run

    _be_modest()
    chosen, shape, settings = read_recipe(recipe)
    given: dict[str, Any] = {"layers": layers, "block": block, "markov": markov, "rank": rank}
    shape = replace(shape, **{k: v for k, v in given.items() if v is not None})
    if steps is not None:
        chosen = replace(chosen, steps=steps)
    elif minutes is not None:
        chosen = replace(chosen, steps=2**31)
    budget = _bytes(feature_budget)
    where = _where(target, device, threads)
    with cancel_on_interrupt() as cancelled:
        folder = data or out / "data"
        left = None if minutes is None else minutes * (1 - SYNTHESIS_SHARE if data is None else 1)
        done = (folder / "synthesis.json").is_file()
        if data is None and not done:
            share = None if minutes is None else minutes * SYNTHESIS_SHARE
            made = _synthesise(where, settings, folder, 2000, share, prompts, threads, exact, cancelled)
            say(f"Made {made['conversations']} conversations, {made['answer_tokens']} answer tokens.")
        how = run(
            where, shape, chosen, folder, out, seconds=None if left is None else left * 60, feature_budget=budget,
            precision=precision, start=start, cancelled=cancelled, say=say,
        )  # fmt: skip
    held = how["held_out"]
    quality = f", accepted length {held['accepted_length']:.2f} on held-out text" if held else ""
    typer.echo(
        f"{out}: a head after {how['steps']} steps{quality}. Try it: dspark race --target {target} --draft {out}"
    )
    if cancelled.is_set():
        raise typer.Exit(130)


def _be_modest() -> None:
    """Before PyTorch is loaded: threads that wait for work sleep, because one that spins beside other programs stops
    the whole team at every product.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def say(text: str) -> None:
    """A line of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _where(target: str, device: str, threads: int | None = None) -> Where:
    from local_runner.engines.torch.load import pick_device
    from local_runner.progress import shown
    from local_runner.store import resolve
    from local_runner.training import Where

    with shown() as report:
        path = resolve(target, may_pull=True, report=report).target_path
    # What computes decides how the work is shared out, so it is settled here.
    return Where(path, pick_device(device).type, threads or os.cpu_count() or 1)


def _synthesise(
    where: Where, settings: dict[str, Any], out: Path, conversations: int, minutes: float | None, prompts: Path | None,
    threads: int | None, exact: bool, cancelled: Any,
) -> dict[str, Any]:  # fmt: skip
    from dataclasses import replace

    from local_runner.prompts import read_prompts
    from local_runner.training import synthesise as run
    from sglang_dspark.training.synthesise import Settings

    # Products of this size gain nothing from a second thread that a second process does not gain in full.
    workers = (threads or os.cpu_count() or 1) if where.device == "cpu" else 1
    texts = [(p.domain, p.turns[0]) for p in read_prompts(prompts) if p.turns] if prompts else []
    return run(
        replace(where, threads=1), Settings(**settings), out, conversations=conversations,
        seconds=None if minutes is None else minutes * 60, workers=workers, quantised=not exact, prompts=texts,
        cancelled=cancelled, say=say,
    )  # fmt: skip


def _bytes(text: str) -> int:
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.strip().upper().rstrip("KMGIB")
    unit = text.strip().upper()[len(number) :]
    try:
        size = int(float(number) * units[unit.strip()])
    except (ValueError, KeyError):
        size = -1
    if size < 0:
        raise InputError(f"'{text}' is no size of memory; give one like 4GB or 500MB.")
    return size
