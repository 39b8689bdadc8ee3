"""This machine, read from the system and measured."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from local_runner.machine import Cpu, Machine, Pool, machine_files, parse_machine
from local_runner.machine.gpus import Gpu, gpus
from local_runner.machine.memory import ROOT, Memory, memory

Bandwidth = Callable[[str], tuple[float, str]]
"""From a device's name to the bytes per second at which its memory is read, and how that is known."""

METAL_SHARE = 0.75
"""How much of a Mac's memory Metal lets a program keep resident, by default; smaller Macs allow somewhat less."""
INSTRUCTIONS = {
    "avx2": "avx2", "avx512f": "avx512f", "avx512_bf16": "avx512_bf16", "avx512_vnni": "avx512_vnni",
    "amx_tile": "amx", "asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve",
    "sve2": "sve2",
}  # fmt: skip
"""What /proc/cpuinfo calls an instruction set, and what it is called here."""
REPEATS = 3
GB10_ROWS = 64
"""Rows of a verification above which one family of kernels is reported to deadlock on GB10."""


def this_machine(
    *, root: Path = ROOT, found: Sequence[Gpu] | None = None, bandwidth: Bandwidth | None = None, system: str = ""
) -> Machine:
    """The machine that this runs on. Memory is free as it is now; reading speeds are measured, in about a second each.

    `root` (where /proc and /sys are), `found` (its graphics processors), `bandwidth` and `system` (as `sys.platform`)
    stand in for the real ones in tests.
    """
    ram, speed = memory(root), bandwidth or measured
    cards = list(gpus() if found is None else found)
    notes: list[str] = []
    if (system or sys.platform) == "darwin" and platform.machine() in ("arm64", "aarch64"):
        size = round(ram.total * METAL_SHARE)
        pools = [_pool("unified", "unified", size, min(size, ram.available), "mps", speed)]
        notes.append("Metal keeps at most about three quarters of a Mac's memory resident; that is taken as its size.")
    elif any(card.integrated for card in cards):
        pools = [_unified(cards, ram, speed)]
        notes.append("Processor and graphics share one memory: free is what the kernel calls available.")
    else:
        pools = [_card(card, len(cards), speed) for card in cards if card.size]
        pools.append(_pool("system", "system", ram.total, ram.available, "cpu", speed))
    if ram.available < ram.host_available:
        notes.append(
            f"A control group allows {ram.available / 1e9:.1f} GB of the {ram.host_available / 1e9:.1f} GB available."
        )
    rows = GB10_ROWS if any("GB10" in card.name for card in cards) else None
    return Machine("this machine", cpu(root), tuple(sorted(pools, key=lambda p: -p.bandwidth)), tuple(notes), rows)


def cpu(root: Path = ROOT) -> Cpu:
    """The processor, from /proc/cpuinfo where there is one."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    instructions = [ours for theirs, ours in INSTRUCTIONS.items() if theirs in flags]
    if not flags and platform.machine() in ("arm64", "aarch64"):
        instructions = ["neon"]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return Cpu(name, _cores(), tuple(instructions))


def measured(device: str) -> tuple[float, str]:
    """The reading speed of a device's memory: the best of several ways to sum a buffer much larger than the caches.

    A device that PyTorch cannot use is given what the vendor states, from the machine files; without that, 100 GB/s.
    """
    kind, _, name = device.partition("=")
    import torch

    from local_runner.measure import bandwidth, interleaved, read_samples

    if kind == "cpu" or (kind.startswith("cuda") and torch.cuda.is_available()):
        return bandwidth(interleaved(read_samples(torch.device(kind)), REPEATS))[0], "measured"
    return published(name) or (100e9, "assumed")


def unmeasured(device: str) -> tuple[float, str]:
    """Any speed, for when only sizes matter."""
    return 1.0, "not measured"


def published(name: str) -> tuple[float, str] | None:
    """The vendor's figure for the device of that name, from the machine files, if one of them has it."""
    for file in machine_files().values():
        for pool in parse_machine(file).pools:
            if pool.source and name and name.removeprefix("NVIDIA ") in pool.source:
                return pool.bandwidth, pool.source
    return None


def _card(card: Gpu, count: int, speed: Bandwidth) -> Pool:
    name = "gpu" if count == 1 else f"gpu {card.index}"
    assert card.size is not None
    rate, source = speed(f"cuda:{card.index}={card.name}")
    return Pool(name, "gpu", card.size, min(card.size, card.free or 0), rate, source, f"cuda:{card.index}")


def _unified(cards: Sequence[Gpu], ram: Memory, speed: Bandwidth) -> Pool:
    """One pool for all: MemAvailable is what is free, and no more than the device can address."""
    size = min([ram.total, *(card.size for card in cards if card.size)])
    device = f"cuda:{cards[0].index}"
    rate, source = speed(f"{device}={cards[0].name}")
    return Pool("unified", "unified", size, min(size, ram.available), rate, source, device)


def _pool(name: str, kind: str, size: int, free: int, device: str, speed: Bandwidth) -> Pool:
    rate, source = speed(device)
    return Pool(name, "unified" if kind == "unified" else "system", size, min(size, free), rate, source, device)


def _cores() -> int:
    """Physical cores, and no more than this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))
