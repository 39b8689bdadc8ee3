"""Judging a draft checkpoint, alone or against a target, and what each engine would make of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_dspark.checkpoints import deep, probe
from sglang_dspark.checkpoints.checks import CHECKS
from sglang_dspark.checkpoints.drafts import Draft
from sglang_dspark.checkpoints.findings import (
    BASIS,
    ENGINES,
    LEVELS,
    TO_DEEPSPEC,
    TO_GGUF,
    TO_SGLANG,
    Effect,
    Finding,
    Subject,
    Verdict,
)
from sglang_dspark.checkpoints.targets import Target
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import InputError

ON = {"gguf": "llama.cpp"}
"""Engines that compute with another one, and can do what that can."""
READS: dict[str, tuple[str, ...]] = {
    "torch": ("deepspec", "specforge", "speculators", "sglang", "gguf"),
    "sglang": ("deepspec", "specforge", "sglang", "lfm2", "minimax", "deepseek-v4"),
    "sglang-dspark": ("deepspec", "specforge", "speculators", "sglang", "lfm2", "minimax", "deepseek-v4"),
    "vllm": ("deepspec", "specforge", "speculators", "sglang", "deepseek-v4"),
    "gguf": ("deepspec", "specforge", "speculators", "sglang", "gguf"),  # what is no GGUF it converts by itself
    "llama.cpp": ("gguf",),
}
"""The formats that an engine reads."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and a verdict for each engine."""

    draft: str
    target: str | None
    format: str
    findings: Sequence[Finding]
    verdicts: Sequence[Verdict]

    @property
    def sound(self) -> bool:
        """Whether no check failed and at least one engine that there is runs the pair as trained."""
        failed = any(f.state == "failure" for f in self.findings)
        return not failed and any(v.level == "runs" for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, with the engines' titles and what each verdict rests on."""
        return {
            "draft": self.draft,
            "target": self.target,
            "format": self.format,
            "sound": self.sound,
            "checks": [asdict(f) | {"effects": {e: asdict(x) for e, x in f.effects.items()}} for f in self.findings],
            "engines": [
                {
                    "engine": v.engine,
                    "title": ENGINES[v.engine],
                    "verdict": v.level,
                    "basis": BASIS[v.engine],
                    "reasons": [asdict(r) for r in v.reasons],
                }
                for v in self.verdicts
            ],
        }


def subject(draft: Draft, target: Target | None = None, block: int | None = None) -> Subject:
    """What is to be examined, its configuration read as far as it goes."""
    config: DraftConfig | None = None
    problem: str | None = None
    try:
        config = draft.config(target.layers if target else None)
    except InputError as error:
        problem = str(error)
    return Subject(draft, target, block, config, problem)


def examine(s: Subject, extra: Sequence[Finding] = (), called: str = "DRAFT") -> Report:
    """Run every check of headers, or only the first for what is no DSpark draft.

    `extra` findings, of weights or of a probe, are added to theirs.

    `called` is what the user calls the draft, for the commands that remedies are.
    """
    dspark = s.draft.format.kind == "dspark"
    checks = [check for name, check in CHECKS.items() if dspark or name == "configuration"]
    findings = [*(f for check in checks for f in check(s)), *extra]
    verdicts = [verdict(engine, s, findings) for engine in ENGINES]
    name = s.target.name if s.target else None
    found = [replace(f, remedy=_addressed(f.remedy, called), effects=_effects(f, called)) for f in findings]
    judged = [
        replace(v, reasons=[replace(r, remedy=_addressed(r.remedy, called)) for r in v.reasons]) for v in verdicts
    ]
    return Report(s.draft.name, name, s.draft.format.name, found, judged)


def _effects(finding: Finding, called: str) -> dict[str, Effect]:
    return {e: replace(x, remedy=_addressed(x.remedy, called)) for e, x in finding.effects.items()}


def _addressed(remedy: str, called: str) -> str:
    return remedy.replace(" DRAFT ", f" {called} ")


def verdict(engine: str, s: Subject, findings: Sequence[Finding]) -> Verdict:
    """The worst of what the findings, the format and the backbone mean for `engine`."""
    named = (f.effects.get(engine) or f.effects.get(ON.get(engine, "")) for f in findings)
    effects = [*_format_effects(engine, s), *(effect for effect in named if effect)]
    level = LEVELS[max((LEVELS.index(e.level) for e in effects), default=0)]
    return Verdict(engine, level, [e for e in effects if e.level != "runs"])


def _format_effects(engine: str, s: Subject) -> Iterator[Effect]:
    draft, gemma = s.draft, s.config is not None and s.config.backbone == "gemma4"
    if engine in ("gguf", "llama.cpp") and draft.raw.get("general.architecture") == "dspark":
        yield Effect("fails", "it drafts with files of the architecture 'dflash' only", TO_GGUF)
    elif engine == "gguf" and s.target is not None and s.target.header is None:
        yield Effect("fails", "it reads .gguf targets only", "give the target as a .gguf file")
    if engine == "sglang-dspark" and gemma and s.config is not None and (why := gemma4_problem(s.config)):
        yield Effect("fails", why, "run it on the PyTorch engine")
    elif engine == "sglang" and gemma:
        yield Effect("fails", "it has no class for Gemma4DSparkModel", "run it on the PyTorch engine")
    elif engine in ("vllm", "llama.cpp", "gguf") and gemma:
        yield Effect("fails", "it has no Gemma 4 backbone for drafts", "run it on the PyTorch engine")
    elif draft.format.name not in READS[engine] and draft.format.kind == "dspark" and not draft.format.foreign:
        remedy = {"sglang": TO_SGLANG, "sglang-dspark": TO_DEEPSPEC, "llama.cpp": TO_GGUF, "vllm": TO_DEEPSPEC}
        yield Effect("fails", f"it does not read {draft.format.name} files", remedy.get(engine, ""))


def gemma4_problem(config: DraftConfig) -> str | None:
    """Why SGLang cannot hold a draft with a Gemma 4 backbone, or None."""
    if config.activation == "silu":
        return "its Gemma 4 backbone has silu, which only the PyTorch engine computes"
    if len({(a.kv_heads, a.head_dim) for a in config.attention}) > 1:
        return "its layers have keys of different shapes, which SGLang's cache for drafts cannot hold"
    return None


def explain(name: str) -> str:
    """What the check `name` looks for and why it matters. Raises InputError for an unknown name."""
    known = {**CHECKS, **deep.CHECKS, "acceptance": probe.acceptance}
    if name not in known:
        raise InputError(f"There is no check '{name}'; the checks are {', '.join(known)}.")
    return inspect.getdoc(known[name]) or ""
