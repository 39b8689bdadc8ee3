"""The result of a race as one JSON object, which the terminal, the README and every later reader show.

Figures are taken within a repeat, plain and DSpark interleaved, and then the median over repeats is kept. A domain's
figures pool its prompts: tokens over seconds. `macro_mean` is the mean of the domains, each counting the same.
Counts (tokens, rounds, drafted, scheduled, accepted) are over all repeats.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from local_runner.engine import Decoding, Engine, Mode
from local_runner.identity import Identity
from local_runner.race import Run
from local_runner.room import used
from sglang_dspark.decoding.rounds import Round, conditional_by_position, summarise, survival_by_position

FIGURES = ("plain_tokens_per_s", "dspark_tokens_per_s", "speedup", "mean_accepted_length", "draft_acceptance_rate")
Figures = dict[str, float | None]


def race_result(
    engine: Engine, pair: str | None, runs: Sequence[Run], identity: Identity, decoding: Decoding
) -> dict[str, Any]:
    """The result of complete `runs` (see `race`): rates in tokens per second, shares from 0 to 1, margins in logits."""
    description = dict(engine.description)
    total = figures(runs)
    dspark = summarise(_rounds(runs, "dspark"))
    by_domain = _groups(runs, lambda run: run.heat.prompt.domain)
    counts = {
        k: getattr(dspark, k) for k in ("tokens", "mean_accepted_length", "rounds", "drafted", "scheduled", "accepted")
    }
    result: dict[str, Any] = {
        "pair": pair or f"{description.get('target')} + {description.get('draft')}",
        "engine": description,
        "machine": machine(),
        "memory": used(description),
        "prompts": len({r.heat.prompt.id for r in runs}),
        "plain": {
            "tokens_per_s": total["plain_tokens_per_s"],
            "tokens": summarise(_rounds(runs, "plain")).tokens,
        },
        "dspark": {"tokens_per_s": total["dspark_tokens_per_s"], **counts},
        "speedup": total["speedup"],
        "first_difference": asdict(identity.differences[0]) if identity.differences else None,
        "identity": asdict(identity) | {"sentence": identity.sentence},
        "width_noise": identity.width_noise,
        "draft_acceptance_rate": dspark.draft_acceptance_rate,
        "survival": survival_by_position(_rounds(runs, "dspark"), engine.block),
        "conditional": conditional_by_position(_rounds(runs, "dspark"), engine.block),
        "domains": by_domain,
        "macro_mean": {name: _mean(d[name] for d in by_domain.values()) for name in FIGURES},
        "per_prompt": _groups(runs, lambda run: run.heat.name),
        "overhead_share": {"plain": _overhead(runs, "plain"), "dspark": _overhead(runs, "dspark")},
        "repeats": len({r.heat.repeat for r in runs}),
        "max_new_tokens": decoding.max_new_tokens,
        "sampling": asdict(decoding.sampling),
        "schedule": str(decoding.schedule),
        "draft_style": decoding.draft_style,
        "command": shlex.join(["dspark", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {key: _tidy(value) for key, value in result.items()}


def figures(runs: Sequence[Run]) -> Figures:
    """FIGURES over `runs`: each pooled within a repeat, then the median over repeats; None where there is none."""
    per_repeat = [_pooled([r for r in runs if r.heat.repeat == n]) for n in sorted({r.heat.repeat for r in runs})]
    found: Figures = {}
    for name in FIGURES:
        known = [v for f in per_repeat if (v := f[name]) is not None]
        found[name] = median(known) if known else None
    return found


def machine() -> dict[str, Any]:
    """What this machine is: processor, cores this process may use, memory in bytes, operating system, Python."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _groups(runs: Sequence[Run], key: Callable[[Run], str]) -> dict[str, dict[str, Any]]:
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(key(run), []).append(run)
    return {name: {"prompts": len({r.heat.prompt.id for r in m}), **figures(m)} for name, m in members.items()}


def _pooled(runs: Sequence[Run]) -> Figures:
    plain, dspark = summarise(_rounds(runs, "plain")), summarise(_rounds(runs, "dspark"))
    return {
        "plain_tokens_per_s": plain.tokens_per_s or None,
        "dspark_tokens_per_s": dspark.tokens_per_s or None,
        "speedup": dspark.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s and dspark.tokens_per_s else None,
        "mean_accepted_length": dspark.mean_accepted_length,
        "draft_acceptance_rate": dspark.draft_acceptance_rate,
    }


def _rounds(runs: Iterable[Run], mode: Mode) -> list[Round]:
    return [round_ for run in runs if run.heat.mode == mode for round_ in run.rounds]


def _overhead(runs: Sequence[Run], mode: Mode) -> float | None:
    """The share of the wall clock that no round's draft or verification accounts for."""
    wall = sum(r.wall_s for r in runs if r.heat.mode == mode)
    timed = sum(r.draft_s + r.verify_s for r in _rounds(runs, mode))
    return max(0.0, 1 - timed / wall) if wall else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _tidy(value: Any) -> Any:
    """Floats to six significant digits: what lies beyond is noise, and results are read by people."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _tidy(item) for key, item in value.items()}
    return [_tidy(item) for item in value] if isinstance(value, list | tuple) else value
