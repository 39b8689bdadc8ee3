"""Targets and heads on a model hub, fetched into the hub's own cache, where other programs find and share them.

A pair may name a branch. The first pull resolves it to a commit and writes a record (commit, sizes and SHA-256 of all
files) into the store's `hub` folder; from then on exactly that is used. Weights are safetensors only: neither pickles
nor a repository's code are downloaded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from local_runner.fetching import check_room, only_one, publish, run_child, sha256_of, size_below, writing
from local_runner.pairs import HubSource
from local_runner.progress import Report
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root

ALLOWED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHILD = "import json, sys, huggingface_hub; huggingface_hub.snapshot_download(**json.loads(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository: its bytes, and its SHA-256 if known."""

    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubRecord:
    """What a revision was at its first pull."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, HubFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def record_path(source: HubSource) -> Path:
    """Where the store keeps the record of `source`, pulled or not."""
    return store_root() / "hub" / f"{source.repo}@{source.revision}.json".replace("/", "--")


def read_record(source: HubSource) -> HubRecord | None:
    """The record of the first pull, or None before it. Raises InputError if the record is not one."""
    path = record_path(source)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        files = {name: HubFile(int(file["size"]), str(file["sha256"])) for name, file in data["files"].items()}
        return HubRecord(str(data["repo"]), str(data["revision"]), str(data["commit"]), files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a record of a pull; delete it and pull again.") from error


def hub_path(source: HubSource) -> Path | None:
    """The folder of the recorded commit in the hub's cache, or None if it is not there."""
    record = read_record(source)
    return _snapshot(record) if record else None


def hub_problem(source: HubSource, *, hashes: bool) -> str | None:
    """A clause saying what is wrong with the fetched files, or None; their SHA-256 are computed only if `hashes`."""
    record = read_record(source)
    folder = _snapshot(record) if record else None
    if record is None or folder is None:
        return f"{source.repo} has not been fetched"
    wrong = _wrong(record, folder, hashes=hashes)
    return f"{folder / wrong[0]} is missing or damaged" if wrong else None


def fetch_hub(source: HubSource, report: Report) -> None:
    """Fetch what is missing or damaged. Raises InputError; an interrupted fetch keeps the files that are whole."""
    if hub_problem(source, hashes=True) is None:
        return
    path = record_path(source)
    with writing(path.parent), only_one(path.with_suffix(".lock"), report, source.repo):
        record = read_record(source)
        expected = record or _ask_hub(source)
        if (folder := _snapshot(expected)) is not None:
            for name in _wrong(expected, folder, hashes=True):
                _remove(folder / name)
        folder = _download(expected, report)
        for name in _wrong(expected, folder, hashes=True):
            _remove(folder / name)
            raise InputError(
                f"{name} of {source.repo} at commit {expected.commit} has not the expected size and SHA-256 and was"
                " removed; pull again."
            )
        if record is None:
            hashed = {name: HubFile(file.size, sha256_of(folder / name)) for name, file in expected.files.items()}
            temporary = path.with_suffix(".tmp")
            pinned = HubRecord(expected.repo, expected.revision, expected.commit, hashed)
            temporary.write_text(json.dumps(asdict(pinned), indent=1), encoding="utf-8")
            publish(temporary, path)


def _ask_hub(source: HubSource) -> HubRecord:
    """The commit that `source` means now, and its files; small files have no SHA-256 on the hub."""
    with _hub_errors(source.repo, source.revision):
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
    siblings = {file.rfilename: file for file in info.siblings or []}
    files = {
        name: HubFile(siblings[name].size or 0, lfs.sha256 if (lfs := siblings[name].lfs) else None)
        for name in siblings
        if any(fnmatchcase(name, pattern) for pattern in ALLOWED)
    }
    if info.sha is None or not _COMMIT.fullmatch(info.sha):
        raise InputError(f"The hub names no commit for {source.repo}@{source.revision}; check HF_ENDPOINT.")
    if not any(name.endswith(".safetensors") for name in files):
        raise InputError(f"{source.repo} holds no safetensors weights; other formats are not loaded, convert it first.")
    return HubRecord(source.repo, source.revision, info.sha, files)


def _cache(repo: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _snapshot(record: HubRecord) -> Path | None:
    folder = _cache(record.repo) / "snapshots" / record.commit
    return folder if folder.is_dir() else None


def _wrong(record: HubRecord, folder: Path, *, hashes: bool) -> list[str]:
    """The files that are missing, of another size or, if `hashes`, of another SHA-256 than the record's."""

    def is_wrong(name: str, file: HubFile) -> bool:
        path = folder / name
        if not path.is_file() or path.stat().st_size != file.size:
            return True
        return hashes and file.sha256 is not None and sha256_of(path) != file.sha256

    return [name for name, file in record.files.items() if is_wrong(name, file)]


def _remove(path: Path) -> None:
    """Remove a file of a snapshot and the content that it links to, so that it is fetched again."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _download(record: HubRecord, report: Report) -> Path:
    blobs = _cache(record.repo) / "blobs"
    before = size_below(blobs)
    folder = _snapshot(record)
    missing = _wrong(record, folder, hashes=False) if folder else list(record.files)
    needed = sum(record.files[name].size for name in missing)
    if folder and not missing:
        return folder
    check_room(blobs, needed, record.repo)
    what = f"Downloading {record.repo}"
    report(what, 0, needed)
    others = set(blobs.glob("*.incomplete"))
    log = record_path(HubSource("", record.repo, record.revision)).with_suffix(".log")
    arguments = {"repo_id": record.repo, "revision": record.commit, "allow_patterns": ALLOWED}
    try:
        code = run_child(
            [sys.executable, "-c", _CHILD, json.dumps(arguments)],
            {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            log,
            lambda: report(what, min(size_below(blobs) - before, needed), needed),
        )
    finally:
        # The hub's library never goes on with these, and a downloader that was ended could not remove its own.
        for half in set(blobs.glob("*.incomplete")) - others:
            half.unlink(missing_ok=True)
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    log.unlink()
    folder = _snapshot(record)
    if code != 0 or folder is None:
        reason = lines[-1].rstrip(".") if lines else f"exit code {code}"
        raise InputError(
            f"The download of {record.repo} stopped ({reason}); pull again, whole files that have arrived are kept."
        )
    report(what, needed, needed)
    return folder


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    try:
        yield
    except GatedRepoError as error:
        raise InputError(
            f"{repo} is gated; accept its terms on its page, log in with `hf auth login` or HF_TOKEN, and pull again."
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"The hub has no repository {repo} that you may read; check its name, or log in with `hf auth login` or"
            " HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"{repo} has no revision '{revision}'; correct 'revision' in the pair's file.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise InputError(
            f"The hub refused {repo} (HTTP {status}); try again later, or log in if it is private."
        ) from error
    except HFValidationError as error:
        raise InputError(f"'{repo}' cannot be a hub id; write owner/name as on its page.") from error
    except (httpx.HTTPError, ConnectionError) as error:
        raise InputError(
            f"The hub cannot be reached for {repo} ({type(error).__name__}); check the network, HF_ENDPOINT and"
            " HF_HUB_OFFLINE, or pass a local folder instead."
        ) from error
    except OSError as error:
        raise InputError(f"The hub's settings cannot be read ({error}); check HF_HOME.") from error
