"""Trains a head on the device: minutes there are hours on a CPU."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from local_runner.gpu_check.parts import Result
from local_runner.training import Where, read_recipe, synthesise, train

SYNTHESIS_SHARE = 0.35
SLOTS = 768
CONVERSATIONS = 200_000
FEATURES = 0.5
"""Of the free memory, for features: what the sequences of some minutes take is less where there is a GPU to fill it."""


def trained_head(result: Result, *, device: str, target: Path, recipe: Path, seconds: float, out: Path) -> None:
    """Let the target write text, train a head on it by `recipe`, and leave the head in `out`; all within `seconds`.

    The time of the recipe's steps is the time that is left: its schedule follows that.
    """
    from dataclasses import replace

    from sglang_dspark.training.synthesise import Settings

    chosen, shape, settings = read_recipe(recipe)
    where = Where(target, device)
    never = threading.Event()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(f"  {line}", flush=True)

    result["text"] = synthesise(
        where, replace(Settings(**settings), slots=SLOTS), out / "data", conversations=CONVERSATIONS,
        seconds=seconds * SYNTHESIS_SHARE, workers=1, quantised=False, prompts=(), cancelled=never, say=say,
    )  # fmt: skip
    result["head"] = train(
        where, shape, replace(chosen, steps=2**31), out / "data", out, seconds=seconds * (1 - SYNTHESIS_SHARE) - 30,
        feature_budget=int(FEATURES * psutil.virtual_memory().available), precision="auto", cancelled=never, say=say,
    )  # fmt: skip
    result["lines"] = lines[-5:]
    found = result["head"]["held_out"]
    result.setdefault("checks", {})["the head drafts what the target wants"] = (
        found is not None and found["accepted_length"] > 1.0
    )
