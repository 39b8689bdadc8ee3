"""The command `dspark calibrate`: decode whole blocks, fit temperatures to one half, judge them on the other."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from local_runner.options import OUTPUT, PROMPT, Settings, open_engine, shared
from local_runner.prompts import Prompt, read_prompts, take
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from local_runner.evaluation import Talk

    Blocks = tuple[NDArray[np.float64], NDArray[np.int64]]
    """Confidences [n, γ] and how many tokens of each block were accepted [n]."""
    Bins = tuple[Sequence[float], Sequence[float], Sequence[int]]

FEW = 1000
"""Blocks below which an expected calibration error is mostly noise."""

say = partial(typer.echo, err=True)


@shared(max_new_tokens=256)
def calibrate(
    settings: Settings,
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='A JSONL file: {"prompt": …} or {"turns": […, …]} a line. One half is fitted, the other judged.',
            rich_help_panel=PROMPT,
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=2, help="At most so many prompts, from all domains alike.", rich_help_panel=PROMPT),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="Where the temperatures are written.", rich_help_panel=OUTPUT),
    ] = Path("calibration.json"),
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Write reliability diagrams as SVG.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Calibrate a draft's confidence on real decoding, by sequential temperature scaling (STS).

    Put calibration.json into the draft's folder, and every engine uses it: for that very draft, and its whole blocks.
    """
    from local_runner.evaluation import check_fit, decode_tasks
    from local_runner.fetching import sha256_of
    from local_runner.files import whole_file
    from local_runner.interrupt import cancel_on_interrupt
    from local_runner.options import _paths
    from local_runner.tasks import Task
    from sglang_dspark.decoding.calibrate import Calibration, calibration_file, draft_identity, errors, fit, scale

    if settings.schedule not in (None, "fixed") or settings.confidence_threshold is not None:
        raise InputError("Calibration verifies whole blocks; leave out --schedule and --confidence-threshold.")
    fitted, held_out = halves(take(read_prompts(prompts), limit))
    tasks = [Task("fitted", tuple(fitted)), Task("held out", tuple(held_out))]
    decoding = settings.decoding()
    with ExitStack() as stack:
        stored = stack.enter_context(whole_file(out))
        image = stack.enter_context(whole_file(plot)) if plot else None
        target, draft, name = _paths(settings)
        engine, _ = open_engine(settings, say)
        if draft is None or not engine.has_confidence:
            raise InputError("Only a draft with a confidence head can be calibrated; choose another --draft.")
        if hasattr(engine, "calibrate"):
            engine.calibrate(None)  # what is there already must not be calibrated a second time
        check_fit(engine, tasks)
        with cancel_on_interrupt() as cancelled:
            talks = decode_tasks(engine, tasks, decoding, "dspark", say=say, cancelled=cancelled)
            if cancelled.is_set():
                say("Cancelled; nothing was stored.")
                raise typer.Exit(130)
        parts = {task.name: [t for t in talks if t.task == task.name] for task in tasks}
        blocks = {name: whole_blocks(part, engine.block) for name, part in parts.items()}
        if min(len(accepted) for _, accepted in blocks.values()) < FEW:
            say(f"Note: fewer than {FEW} blocks in a half leave much to chance; give more prompts or longer answers.")
        provenance: dict[str, Any] = {
            "pair": name,
            "target": target_identity(target),
            "temperature": decoding.sampling.temperature,
            "sampling": asdict(decoding.sampling),
            "draft_style": decoding.draft_style,
            "max_new_tokens": decoding.max_new_tokens,
            "data": {"sha256": sha256_of(prompts)},
            "engine": dict(engine.description),
            "command": shlex.join(["dspark", *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        for name, (_, accepted) in blocks.items():
            provenance["data"][name] = {"prompts": len(parts[name]), "blocks": len(accepted)}
        temperatures = fit(*blocks["fitted"])
        before = blocks["held out"]
        after = scale(before[0], temperatures), before[1]
        provenance["ece"] = {"before": errors(*before), "after": errors(*after)}
        stored.write(Calibration(temperatures, draft_identity(draft), provenance).to_json())
        if image:
            image.write(picture(before, after))
    show(temperatures, provenance["ece"])
    typer.echo(f"Written to {out}; put it at {calibration_file(draft)} to use it.")


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Every other prompt of each domain, and the rest. Raises InputError for fewer than two prompts."""
    if len(prompts) < 2:
        raise InputError("Calibration needs at least two prompts: one half is fitted and the other judged.")
    ordered = sorted(prompts, key=lambda prompt: prompt.domain)
    return ordered[::2], ordered[1::2]


def whole_blocks(talks: Sequence[Talk], block: int) -> Blocks:
    """The confidences and the outcome of every block that was verified whole, so that nothing about it is unknown."""
    import numpy as np

    from sglang_dspark.decoding.rounds import decode_rounds

    rounds = [r for talk in talks for r in decode_rounds(talk.rounds) if r.scheduled == block]
    confidence = np.array([r.confidence for r in rounds], float).reshape(-1, block)
    return confidence, np.array([r.accepted for r in rounds], int)


def target_identity(path: Path) -> dict[str, str]:
    """The target's name, and the SHA-256 of its configuration or of its .gguf file."""
    from local_runner.fetching import sha256_of

    return {"name": path.name, "sha256": sha256_of(path / "config.json" if path.is_dir() else path)}


def picture(before: Blocks, after: Blocks) -> str:
    """Reliability and ECE of blocks before and after calibration, as SVG."""
    import numpy as np

    from local_runner.plots import line_chart, page, reliability_diagram
    from sglang_dspark.decoding.calibrate import errors, reliability

    kinds = {"before": before, "after": after}
    survival: dict[str, Bins] = {}
    conditional: dict[str, Bins] = {}
    for name, (confidence, accepted) in kinds.items():
        positions = np.arange(confidence.shape[1])
        survived, reached = accepted[:, None] > positions, accepted[:, None] >= positions
        for found, given, outcome in (
            (survival, confidence.cumprod(1).ravel(), survived.ravel()),
            (conditional, confidence[reached], survived[reached]),
        ):
            bins = reliability(given, outcome)
            found[name] = (bins.predicted, bins.observed, bins.counts)
    charts = [
        reliability_diagram("Survival, all positions", survival),
        reliability_diagram("Conditional acceptance, all positions", conditional),
    ]
    for kind, title in (("survival", "ECE of survival"), ("conditional", "ECE of conditional acceptance")):
        lines = {name: list(enumerate(errors(*blocks)[kind], start=1)) for name, blocks in kinds.items()}
        charts.append(line_chart(title, lines, "position in the block", "expected calibration error"))
    return page(charts)


def show(temperatures: Sequence[float], ece: dict[str, dict[str, list[float | None]]]) -> None:
    """Temperatures and errors by position, for people."""
    from rich.console import Console
    from rich.table import Table

    from local_runner.report import number

    columns = [(kind, when) for kind in ("survival", "conditional") for when in ("before", "after")]
    table = Table("position", "T", *(f"{kind} ECE, {when}" for kind, when in columns))
    for k, t in enumerate(temperatures):
        table.add_row(str(k + 1), f"{t:.3g}", *(number(ece[when][kind][k], ".1%") for kind, when in columns))
    console = Console()
    (console if console.file.isatty() else Console(width=120, color_system=None)).print(table)
