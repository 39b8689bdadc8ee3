"""What the doctor says: findings of named checks, and what they mean for each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.targets import Target
from sglang_dspark.draft.config import DraftConfig

State = Literal["ok", "note", "warning", "failure"]
Level = Literal["runs", "worse", "fails"]
LEVELS: tuple[Level, ...] = ("runs", "worse", "fails")

ENGINES = {
    "torch": "this package, PyTorch engine",
    "gguf": "this package, GGUF engine",
    "sglang": "SGLang 0.5.23, native DSPARK (not on CPUs)",
    "sglang-dspark": "SGLang with this package",
    "vllm": "vLLM",
    "llama.cpp": "llama.cpp",
}
BASIS = {
    "torch": "run",
    "gguf": "run",
    "sglang": "run, and its source read",
    "sglang-dspark": "run",
    "vllm": "public reports, not verified here",
    "llama.cpp": "run, and its source read",
}
"""What a verdict on an engine rests on."""

TO_SGLANG = "dspark convert DRAFT --to sglang --out DIR"
TO_GGUF = "dspark convert DRAFT --to gguf --target TARGET.gguf --out DIR"
TO_DEEPSPEC = "dspark convert DRAFT --to deepspec --out DIR"


@dataclass(frozen=True, slots=True)
class Effect:
    """What something does to one engine, why, and what to do about it."""

    level: Level
    why: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: a sentence, what to do, and its effects by engine."""

    check: str
    state: State
    text: str
    remedy: str = ""
    effects: Mapping[str, Effect] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one engine runs the pair as trained: the worst effect counts, all that are not harmless are given."""

    engine: str
    level: Level
    reasons: Sequence[Effect]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined. `config` is None where there is a `problem` with the configuration; `block` is how many tokens
    somebody means to draft.
    """

    draft: Draft
    target: Target | None
    block: int | None
    config: DraftConfig | None
    problem: str | None


def everywhere(level: Level, why: str, remedy: str = "") -> dict[str, Effect]:
    """The same effect on every engine."""
    return {engine: Effect(level, why, remedy) for engine in ENGINES}
