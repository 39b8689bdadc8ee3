"""A real pair on a device: the race in bfloat16, and whether float32 decodes what the CPU decodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from local_runner.engine import Decoding
from local_runner.engines.torch import TorchEngine, load_engine
from local_runner.gpu_check.parts import Result, Skipped
from local_runner.identity import first_difference, judge
from local_runner.prompts import Prompt, read_prompts, take
from local_runner.race import Heat, Run, race, warm_up
from local_runner.result import race_result
from sglang_dspark.decoding.rounds import Round
from sglang_dspark.decoding.sampling import SamplingParams
from sglang_dspark.decoding.schedule import Fixed

NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Models:
    """A target and its draft on this disk, and what to call them."""

    target: Path
    draft: Path
    name: str


class _Nobody:
    """Watches nothing."""

    def begin(self, heat: Heat) -> None: ...

    def round(self, heat: Heat, round_: Round) -> None: ...

    def end(self, run: Run) -> None: ...


def pair_race(
    result: Result, device: torch.device, models: Models | None, prompts: Sequence[Prompt] | None = None
) -> None:
    """Race the pair on built-in prompts (or `prompts`), one from each domain in float32 too.

    In float32 DSpark must commit plain decoding's tokens; in bfloat16 nothing may part that noise does not explain.
    """
    if models is None:
        raise Skipped("the default pair is not on this machine; pull it, or name models with --target and --draft")
    checks: dict[str, bool] = result.setdefault("checks", {})
    decoding = Decoding(NEW_TOKENS, SamplingParams(), Fixed())
    torch.set_float32_matmul_precision("highest")  # no TF32
    for dtype, limit, repeats in (("float32", 3, 1), ("bfloat16", 9, 3)):
        chosen = take(read_prompts() if prompts is None else prompts, limit)
        engine = _load(models, dtype, device)
        never = threading.Event()
        warm_up(engine, chosen[0], decoding, never)
        runs = race(engine, chosen, decoding, repeats=repeats, watcher=_Nobody(), cancelled=never)
        identity = judge(engine, runs, decoding)
        result[dtype] = race_result(engine, models.name, runs, identity, decoding)
        allowed = ("identical",) if dtype == "float32" else ("identical", "numerics")
        checks[f"{dtype}: DSpark commits plain decoding's tokens"] = identity.verdict in allowed
        if dtype == "float32":
            result["float32_agreement_with_cpu"] = _agreement(models, runs[::2], decoding)


def _agreement(models: Models, runs: Sequence[Run], decoding: Decoding) -> float:
    """The share of the tokens of plain `runs` that comes before the first difference from the CPU's."""
    engine = _load(models, "float32", torch.device("cpu"))
    same = 0
    for run in runs:
        request = decoding.request(engine, run.heat.prompt_ids, "plain", "cpu")
        theirs = [t for r in engine.generate(request) for t in r.committed]
        found = first_difference(run.tokens, theirs)
        same += len(run.tokens) if found is None else found[0]
    return same / sum(len(run.tokens) for run in runs)


def _load(models: Models, dtype: str, device: torch.device) -> TorchEngine:
    return load_engine(models.target, models.draft, dtype=dtype, device=str(device), compile=False)
