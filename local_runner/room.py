"""Whether a pair has room on this machine, asked before anything is allocated, and how much memory it then took."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from local_runner.footprint import Footprint
from local_runner.machine import Machine
from local_runner.machine.here import this_machine, unmeasured
from local_runner.machine.memory import ROOT
from local_runner.placement import Plan, Wishes, place
from local_runner.placement.changes import STEP, largest, mb
from local_runner.placement.plan import Placed, thresholds
from sglang_dspark.errors import InputError

PROCESS = Path("/proc/self")
FAMILIES = {"cache": "caches", "backbone": "draft", "W1": "draft", "W2": "draft", "confidence": "draft"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What could be changed of a pair where there is no room for it; `dtype` is None where the engine has no choice."""

    context: int
    dtype: str | None
    drafting: bool

    def __str__(self) -> str:
        pair = f"{'with its draft' if self.drafting else 'without a draft'}{f' in {self.dtype}' if self.dtype else ''}"
        return f"{pair} and {self.context} tokens of context"


Sized = Callable[[Choice], tuple[Footprint, Wishes]]
"""What the pair takes in an engine."""


def make_room(sized: Sized, choice: Choice, device: str) -> dict[str, Any]:
    """The plan of a pair that is about to be loaded on `device`, in bytes, for an engine's description: its peak, that
    of this process included, its parts, and the thresholds of a watchdog.

    Raises InputError that names the need, what there is and the smallest change that would fit.
    """
    _forget_peak(device)
    before = resident() if device == "cpu" else 0
    here = this_machine(root=ROOT, bandwidth=unmeasured)
    plan = _plan(here, sized, choice, device)
    if not plan.fits:
        raise InputError(_refusal(here, plan, sized, choice, device))
    parts: dict[str, int] = {"this process so far": before} if before else {}
    for placed in plan.placed:
        parts[_part(placed)] = parts.get(_part(placed), 0) + placed.bytes
    return {
        "peak_bytes": before + plan.peak,
        "parts": parts | {"more while loading": plan.peak - plan.needed},
        "thresholds": asdict(thresholds(here)),
    }


def used(description: Mapping[str, Any]) -> dict[str, Any]:
    """Peak memory in bytes as an engine's plan predicted it, with full contexts, and as measured since it was loaded:
    of this process, or what PyTorch allocated on a CUDA device.
    """
    planned = description.get("plan") or {}
    return {
        "predicted_peak_bytes": planned.get("peak_bytes"),
        "measured_peak_bytes": peak(str(description.get("device", "cpu"))),
        "predicted_parts": planned.get("parts"),
    }


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(psutil.Process().memory_info().rss)


def peak(device: str = "cpu") -> int | None:
    """The most bytes that were in use at once; None where the system does not tell."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_reserved(device))
    with suppress(OSError):
        for line in (PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _forget_peak(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def _plan(here: Machine, sized: Sized, choice: Choice, device: str) -> Plan:
    """Everything in the one pool that the device computes from: what the engines do."""
    kind = device.split(":")[0]
    pool = next((p for p in here.pools if p.device.split(":")[0] == kind), here.host)
    footprint, wishes = sized(choice)
    return place(replace(here, pools=(replace(pool, device=kind),)), footprint, wishes, explain=False)


def _refusal(here: Machine, plan: Plan, sized: Sized, choice: Choice, device: str) -> str:
    use = plan.uses[0]

    def fits(changed: Choice) -> bool:
        return _plan(here, sized, changed, device).fits

    return (
        f"{plan.footprint.name} {choice} takes up to {mb(plan.peak)} more memory, but of the {mb(use.free)} that are"
        f" free here {mb(use.budget)} may be given out; {_change(choice, fits)}."
    )


def _change(choice: Choice, fits: Callable[[Choice], bool]) -> str:
    """The smallest change that fits, as the options that make it."""
    narrow = replace(choice, dtype="bfloat16") if choice.dtype == "float32" else choice
    for changed, words in (
        (choice, ""),
        (narrow, "--dtype bfloat16"),
        (replace(choice, drafting=False), "--target without a draft"),
        (replace(narrow, drafting=False), "--target without a draft"),
    ):
        if changed != choice and fits(changed):
            return f"use {words}"
        if (context := largest(choice.context, _at(changed, fits))) is not None:
            return f"use {' and '.join(filter(None, (words, f'--context-length {context}')))}"
    return f"choose a smaller target, or free memory: not even {STEP} tokens without a draft fit"


def _at(choice: Choice, fits: Callable[[Choice], bool]) -> Callable[[int], bool]:
    return lambda context: fits(replace(choice, context=context))


def _part(placed: Placed) -> str:
    if placed.kind == "work space":
        return placed.part
    return FAMILIES.get(placed.kind, "draft" if placed.kind.startswith("draft") else "target")
