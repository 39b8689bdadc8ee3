"""System memory as this process may use it: what the kernel calls available, capped by every limit that there is.

psutil does not see cgroups, and containers report the host's memory: the limits of versions 1 and 2 are walked here up
to the root, and those of the process itself (`ulimit`) count too. Swap never counts: decoding from it is slower than
not decoding. `root` is where /proc and /sys are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")
UNLIMITED = 1 << 60
"""Version 1 writes about 2^63 where there is no limit."""

OWN_LIMITS = {"Max address space": "VmSize", "Max data size": "VmData"}
"""What /proc/self/limits calls a limit, and what /proc/self/status calls what is used of it."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `total` and `available` are capped by limits; `host_available` is not; swap is told apart from both."""

    total: int
    available: int
    host_available: int
    swap_used: int


@dataclass(frozen=True, slots=True)
class Group:
    """One memory cgroup: its `limit`, and what is `used` of it that the kernel could not take back, in bytes."""

    path: Path
    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Per cent of the last ten seconds in which some, or all, tasks waited for memory (pressure-stall information)."""

    some: float
    full: float


def memory(root: Path = ROOT) -> Memory:
    """What there is now, from /proc/meminfo, or from psutil where there is none."""
    total, available, swap = _meminfo(root)
    caps = [(g.limit, g.used) for g in cgroups(root)] + list(_own_limits(root))
    return Memory(
        total=min([total, *(limit for limit, _ in caps)]),
        available=max(0, min([available, *(limit - used for limit, used in caps)])),
        host_available=available,
        swap_used=swap,
    )


def pressure(root: Path = ROOT) -> Pressure | None:
    """The worst of the host's pressure and that of every cgroup above us; None where the kernel does not tell."""
    files = [root / "proc/pressure/memory", *(folder / "memory.pressure" for folder, _ in _folders(root))]
    found = [p for f in files if (p := _parse_pressure(_text(f))) is not None]
    return Pressure(max(p.some for p in found), max(p.full for p in found)) if found else None


def cgroups(root: Path = ROOT) -> Iterator[Group]:
    """The memory cgroups with a limit that this process is in, from its own up."""
    for folder, version in _folders(root):
        stat = _numbers(_text(folder / "memory.stat"))
        if version == 2:
            limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
            used, cached = _number(folder / "memory.current"), stat.get("inactive_file", 0)
        else:
            limits = [_number(folder / "memory.limit_in_bytes")]
            used, cached = _number(folder / "memory.usage_in_bytes"), stat.get("total_inactive_file", 0)
        known = [limit for limit in limits if limit is not None and limit < UNLIMITED]
        if known:
            # Clean file pages count as used, and are given back before anything is refused.
            yield Group(folder, min(known), max(0, (used or 0) - cached))


def _own_limits(root: Path) -> Iterator[tuple[int, int]]:
    """What the process may map and write in all, and what it does, in bytes."""
    used = _numbers(_text(root / "proc/self/status").replace(":", " "))
    for line in _text(root / "proc/self/limits").splitlines():
        for title, name in OWN_LIMITS.items():
            words = line.removeprefix(title).split()
            if line.startswith(title) and words and words[0].isdigit():
                yield int(words[0]), used.get(name, 0) << 10


def _folders(root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the memory cgroups above this process, its own first, each with its version."""
    mounts = _mounts(root)
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1 if "memory" in controllers.split(",") else 0
        if version not in mounts:
            continue
        mount, top = mounts[version]
        # In a container the mount shows a part of the tree, and the path may be the host's or lead out of it.
        inside = path.removeprefix(top.rstrip("/")) if path.startswith(top.rstrip("/")) else ""
        folder = mount / inside.strip("/")
        if ".." in Path(inside).parts or not folder.is_dir():
            folder = mount
        while True:
            yield folder, version
            if folder == mount:
                break
            folder = folder.parent


def _mounts(root: Path) -> dict[int, tuple[Path, str]]:
    """Where the hierarchies of each version are mounted, and which of their folders is mounted there."""
    found: dict[int, tuple[Path, str]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = 2 if kind[0] == "cgroup2" else 1 if kind[0] == "cgroup" and "memory" in kind[2].split(",") else 0
        if version:
            found.setdefault(version, (root / fields[4].lstrip("/"), fields[3]))
    return found


def _meminfo(root: Path) -> tuple[int, int, int]:
    """Total, available and swapped-out bytes of the host."""
    fields = _numbers(_text(root / "proc/meminfo").replace(":", " "))
    if "MemTotal" not in fields:
        system = psutil.virtual_memory()
        return int(system.total), int(system.available), int(psutil.swap_memory().used)
    available = fields.get("MemAvailable", fields.get("MemFree", 0))
    swap = fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    return fields["MemTotal"] << 10, available << 10, swap << 10


def _parse_pressure(text: str) -> Pressure | None:
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, *fields = line.split()
        for field in fields:
            key, _, value = field.partition("=")
            if key == "avg10":
                values[name] = float(value)
    return Pressure(values.get("some", 0.0), values.get("full", 0.0)) if values else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numbers(text: str) -> dict[str, int]:
    """The first number after each name that begins a line."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """A file's number; None for `max`, and where there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
