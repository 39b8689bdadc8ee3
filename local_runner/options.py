"""The options that every decoding command has, as one object, and what they open and mean.

A command takes `settings: Settings` first and is decorated with `shared`, which shows its fields as options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from local_runner.engine import Decoding, Device, DraftStyle, Dtype, Engine, Kind
from sglang_dspark.errors import InputError

if TYPE_CHECKING:
    from sglang_dspark.decoding.schedule import Schedule

PROMPT, OUTPUT = "Prompt", "Output"
WHERE = "a local folder, a .gguf file, a pair's name or a hub id"


def _option(panel: str, name: str, text: str, **more: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, **more)


_model = functools.partial(_option, "Models")
_prompt = functools.partial(_option, PROMPT)
_sampling = functools.partial(_option, "Sampling")
_drafting = functools.partial(_option, "Drafting")
_engine = functools.partial(_option, "Engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which models, how they run and how they decode, as given on the command line."""

    pair: Annotated[str | None, _model("--pair", "A known pair (see dspark models list).")] = None
    target: Annotated[str | None, _model("--target", f"The model: {WHERE}.")] = None
    draft: Annotated[str | None, _model("--draft", f"Its DSpark draft: {WHERE}.")] = None
    max_new_tokens: Annotated[int, _prompt("--max-new-tokens", "The longest an answer may get.", min=1)] = 256
    stop: Annotated[
        list[str] | None, _prompt("--stop", "Text that ends an answer and is left out; may be repeated.")
    ] = None
    temperature: Annotated[float, _sampling("--temperature", "0 is greedy.")] = 0.0
    top_k: Annotated[int, _sampling("--top-k", "Keep the K likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, _sampling("--top-p", "Keep the likeliest tokens that hold P together.")] = 1.0
    min_p: Annotated[float, _sampling("--min-p", "Drop tokens less likely than P times the likeliest.")] = 0.0
    repetition_penalty: Annotated[
        float, _sampling("--repetition-penalty", "Divides the logits of tokens already seen; 1 is none.")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", "Subtracted from the tokens of the answer, once.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", "Subtracted for each time a token is in the answer.")
    ] = 0.0
    seed: Annotated[int | None, _sampling("--seed", "Fixes every random choice.")] = None
    schedule: Annotated[
        str | None,
        _drafting(
            "--schedule",
            "How much of a drafted block to verify. Default: all of it in generate; elsewhere adaptive, which measures"
            " this machine, drafts from the head or by look-up, and not at all where that loses.",
            metavar="adaptive|fixed[:K]|threshold:T|algorithm1",
        ),
    ] = None
    confidence_threshold: Annotated[
        float | None,
        _drafting("--confidence-threshold", "Verify up to the first draft less sure than T.", metavar="T"),
    ] = None
    draft_style: Annotated[DraftStyle, _drafting("--draft-style", "The head's best tokens, or drawn from it.")] = (
        "greedy"
    )
    block: Annotated[int | None, _drafting("--block", "Draft fewer tokens than the trained block.", min=1)] = None
    engine: Annotated[
        Kind | None, _engine("--engine", "What computes. Default: torch, or what an adaptive schedule finds quicker.")
    ] = None
    dtype: Annotated[Dtype, _engine("--dtype", "The precision of weights and arithmetic.")] = "auto"
    device: Annotated[Device, _engine("--device", "Where it computes.")] = "auto"
    threads: Annotated[int | None, _engine("--threads", "Processor threads.", min=1)] = None
    context_length: Annotated[
        int | None, _engine("--context-length", "Tokens to make room for, prompt and answer.", min=1)
    ] = None
    compile: Annotated[
        bool | None,
        _engine("--compile/--no-compile", "The compiled CPU kernel, or PyTorch alone. Default: compiled where it can."),
    ] = None

    def decoding(self, *, suited: bool = False) -> Decoding:
        """What they say about decoding. Raises InputError with the one that cannot be.

        Where no schedule is given, whole blocks are verified or, with `suited`, what `Decoding.measured` finds.
        """
        from sglang_dspark.decoding.sampling import SamplingParams

        if self.stop and not all(self.stop):
            raise InputError("--stop is empty; give the text that ends an answer.")
        sampling = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
        )
        return Decoding(
            max_new_tokens=self.max_new_tokens,
            sampling=sampling if sampling.greedy else sampling.with_seed(),
            schedule=self._schedule(None if suited else "fixed"),
            draft_style=self.draft_style,
            stop_strings=tuple(self.stop or ()),
        )

    def _schedule(self, default: str | None) -> Schedule | None:
        from sglang_dspark.decoding.adaptive import Adaptive
        from sglang_dspark.decoding.schedule import Threshold, parse_schedule

        if self.confidence_threshold is None:
            name = self.schedule or default
            if name == "adaptive":
                return Adaptive()
            return None if name is None else parse_schedule(name)
        if self.schedule is not None:
            raise InputError("--confidence-threshold is a schedule of its own; drop it or --schedule.")
        return Threshold(self.confidence_threshold)


def open_engine(
    settings: Settings, say: Callable[[str], None], *, suited: bool = False, reuse_prefix: bool = False
) -> tuple[Engine, str]:
    """Find the models, fetching a pair's that are not here yet, and load them; return the engine and their name.

    Without a pair or a target this is the default pair. With `suited` a pair is decoded by a runner, which measures at
    first use, unless another schedule is given. `reuse_prefix` is as in `Engine`. What the user should know is said.
    Raises InputError with what is missing or does not fit.
    """
    if settings.pair and settings.target:
        raise InputError("--pair already names a target; give either --pair or --target.")
    if settings.draft and not (settings.pair or settings.target):
        raise InputError("--draft needs a target to draft for; add --target or --pair.")
    target, draft, name = _paths(settings)
    free = settings.schedule is None and settings.confidence_threshold is None
    from local_runner.runner import Models, Way, load_way, open_runner

    models = Models(target, draft, settings.block, settings.context_length)
    way = Way(settings.engine or "torch", settings.dtype, settings.compile, settings.threads, settings.device)
    engine: Engine
    if settings.schedule == "adaptive" or (suited and free and draft is not None):
        engine = open_runner(
            models,
            kind=settings.engine,
            dtype=way.dtype,
            device=way.device,
            compile=way.compile,
            threads=way.threads,
            say=say,
        )
    else:
        engine = load_way(models, way, say)
    engine.reuse_prefix = reuse_prefix
    for note in engine.notes:
        say(f"Note: {note}")
    return engine, name


def shared(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the fields of Settings, with these defaults, in place of a command's first parameter."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(Settings, include_extras=True)
        names = [f.name for f in fields(Settings)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        options = [
            inspect.Parameter(f.name, keyword, default=defaults.get(f.name, f.default), annotation=hints[f.name])
            for f in fields(Settings)
        ]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            settings = Settings(**{name: given.pop(name) for name in names})
            command(settings, **given)

        parameters = [*options, *(p.replace(kind=keyword) for p in own)]
        run.__dict__["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__dict__["__wrapped__"]
        return run

    return decorate


def _paths(settings: Settings) -> tuple[Path, Path | None, str]:
    from local_runner.pairs import DEFAULT_PAIR
    from local_runner.progress import shown
    from local_runner.store import resolve, resolve_draft, resolve_pair

    draft: Path | None = None
    with shown() as report:
        if settings.target:
            target, name = resolve(settings.target, may_pull=True, report=report).target_path, _called(settings.target)
        else:
            name = settings.pair or DEFAULT_PAIR
            both = resolve_pair(name, may_pull=True, report=report)
            target, draft = both.target_path, both.draft_path
        if settings.draft:
            draft = resolve_draft(settings.draft, may_pull=True, report=report)
            name = f"{name} + {_called(settings.draft)}"
    return target, draft, name


def _called(spec: str) -> str:
    """What to call a model in results: a path's last part, because the rest of it is nobody else's business."""
    path = Path(spec).expanduser()
    return path.resolve().name if path.exists() else spec
