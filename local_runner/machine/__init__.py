"""One machine: its processor, its pools of memory, and how fast each of them is read.

A `Machine` is read from the real one (`here.this_machine`) or from a TOML file, so that a plan can be made for one that
is elsewhere. Those that ship are in `configs/machines`. Nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from local_runner.pairs import config_root, user_config_root
from sglang_dspark.errors import InputError
from sglang_dspark.toml import read_toml

GIB = 1 << 30
PoolKind = Literal["gpu", "system", "unified"]
KINDS: tuple[PoolKind, ...] = ("gpu", "system", "unified")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor: the cores that this process may use, and the instruction sets that matter for decoding."""

    name: str
    cores: int
    instructions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory that is read at one speed: `size` and `free` in bytes, `bandwidth` in bytes per second.

    `gpu` memory is a graphics card's own; `unified` is one pool for processor and graphics, where giving out more than
    there is can hang the host. `source` says where the bandwidth is from.
    """

    name: str
    kind: PoolKind
    size: int
    free: int
    bandwidth: float
    source: str
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.free <= self.size:
            raise ValueError(f"pool '{self.name}' cannot have {self.free} of {self.size} bytes free")
        if not self.bandwidth > 0:
            raise ValueError(f"pool '{self.name}' must have a positive bandwidth, not {self.bandwidth}")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine. `pools` come fastest first; `notes` say what could not be read, and what was assumed. A forward may
    have at most `max_rows` rows, where that is known to matter.
    """

    name: str
    cpu: Cpu
    pools: tuple[Pool, ...]
    notes: tuple[str, ...] = ()
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("a machine needs at least one pool of memory")
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError(f"pools need names of their own, not {', '.join(names)}")
        if any(a.bandwidth < b.bandwidth for a, b in zip(self.pools, self.pools[1:], strict=False)):
            raise ValueError("pools must be listed fastest first")

    @property
    def host(self) -> Pool:
        """The pool that the operating system itself lives in."""
        return next((p for p in self.pools if p.kind != "gpu"), self.pools[-1])


def machine_files() -> dict[str, Path]:
    """The file of every known machine by its name, sorted by name."""
    found = {
        file.stem: file
        for root in (config_root(), user_config_root())
        for file in sorted((root / "machines").glob("*.toml"))
    }
    return dict(sorted(found.items()))


def load_machine(spec: str) -> Machine:
    """The machine in the file `spec`, or the known one of that name. Raises InputError for neither or a faulty file."""
    path = Path(spec).expanduser()
    if path.is_file():
        return parse_machine(path)
    files = machine_files()
    if spec not in files:
        near = get_close_matches(spec, files, n=2, cutoff=0.5) or list(files)
        raise InputError(f"There is no machine file or known machine '{spec}'; known are {', '.join(near)}.")
    return parse_machine(files[spec])


def parse_machine(file: Path) -> Machine:
    """Read one machine. Raises InputError that names the file and the key at fault."""
    data = read_toml(file)
    where = str(file)
    types = {"name": str, "description": str, "max_rows": int, "cpu": dict, "pools": list}
    keys = _keys({"max_rows": 0, **data}, types, where)
    cpu = _keys(keys["cpu"], {"name": str, "cores": int, "instructions": list}, f"{where}: [cpu]")
    try:
        return Machine(
            keys["name"],
            Cpu(cpu["name"], cpu["cores"], tuple(map(str, cpu["instructions"]))),
            tuple(_pool(pool, f"{where}: pool {i + 1}") for i, pool in enumerate(keys["pools"])),
            (keys["description"],),
            keys["max_rows"] or None,
        )
    except ValueError as error:
        raise InputError(f"{file}: {error}; correct the file.") from error


POOL_KEYS: dict[str, type] = {"name": str, "kind": str, "device": str, "gib": float, "free_gib": float,
                              "gb_per_s": float, "source": str}  # fmt: skip


def _pool(data: Any, where: str) -> Pool:
    if not isinstance(data, dict):
        raise InputError(f"{where} is no table; write [[pools]].")
    keys = _keys({"device": "cpu", "free_gib": data.get("gib"), **data}, POOL_KEYS, where)
    if keys["kind"] not in KINDS:
        raise InputError(f"{where} has the kind '{keys['kind']}'; it must be one of {', '.join(KINDS)}.")
    return Pool(
        name=keys["name"],
        kind=keys["kind"],
        size=round(keys["gib"] * GIB),
        free=round(keys["free_gib"] * GIB),
        bandwidth=keys["gb_per_s"] * 1e9,
        source=keys["source"],
        device=keys["device"],
    )


def _keys(data: Mapping[str, Any], types: Mapping[str, type], where: str) -> dict[str, Any]:
    """Exactly the keys of `types`, each of its type; a whole number counts as a float."""
    if unknown := [key for key in data if key not in types]:
        raise InputError(f"{where} has the unknown key '{unknown[0]}'; the keys are {', '.join(types)}.")
    found: dict[str, Any] = {}
    for key, kind in types.items():
        value = data.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(f"{where} needs '{key}' to be of type {kind.__name__}, not {value!r}.")
        found[key] = value
    return found
